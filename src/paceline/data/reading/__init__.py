"""Reads sets of prompts: rows, tokens, and the number of steps in their epochs."""
