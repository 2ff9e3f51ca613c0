"""Reward functions in killable child processes."""
