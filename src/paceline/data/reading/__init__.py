"""Reads sets of prompts: rows, their tokens, how many steps their epochs are."""
