"""Starts vLLM: its arguments, environment, processes, and what they say when they end."""
