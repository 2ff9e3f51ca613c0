"""Sharded checkpoints: their content; writing in the background, verifying and loading."""
