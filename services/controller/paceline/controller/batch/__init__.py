"""Prompts out, scored samples in, and which of them make up a batch."""
