"""Decides from model and machine what fits: memory, ranks, servers, GPUs."""
