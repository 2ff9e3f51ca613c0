"""Gives vLLM prompts with already processed images."""
