"""Prompts: reads rows, tokenizes them, and orders the run's visits to them; imports no torch."""
