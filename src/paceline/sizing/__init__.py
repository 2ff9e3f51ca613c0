"""Plans memory, ranks, servers and GPUs from the model and the machine."""
