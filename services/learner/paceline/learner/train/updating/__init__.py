"""The losses, the optimizer steps over mini-batches, and the guard on them."""
