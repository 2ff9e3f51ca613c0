"""Sharded checkpoints: what is saved, written in the background, verified and loaded."""
