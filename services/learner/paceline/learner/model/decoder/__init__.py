"""Computes decoder layers: attention, experts, compilation, kept activations."""
