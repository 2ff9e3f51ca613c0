"""Gives vLLM prompts with images that are processed already."""
