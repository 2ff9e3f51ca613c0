"""Sends prompts out, takes scored samples in, and decides which of them make up a batch."""
