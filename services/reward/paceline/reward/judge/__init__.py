"""Scoring by a language model that is asked for a grade."""
