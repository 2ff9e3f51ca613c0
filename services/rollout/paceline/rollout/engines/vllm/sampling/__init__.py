"""Translates requests and answers, draws tokens, and fetches their log-probabilities."""
