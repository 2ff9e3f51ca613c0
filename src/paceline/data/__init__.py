"""Prompts: reading rows, making token ids of them, and the order in which a run visits them; imports no torch itself."""
