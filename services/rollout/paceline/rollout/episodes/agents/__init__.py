"""Lets agents drive episodes through OpenAI-compatible endpoints."""
