"""Starts vLLM: its arguments, environment, processes, and the causes of their end."""
