"""Runs a training step: score, estimate, update."""
