"""Updates networks: losses, optimizer steps over mini-batches, and their guard."""
