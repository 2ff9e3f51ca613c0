"""Starts vLLM: arguments, environment, processes, and the causes of failed starts."""
