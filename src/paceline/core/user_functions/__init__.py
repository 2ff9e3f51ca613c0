"""Finds, checks and calls functions written by the user."""
