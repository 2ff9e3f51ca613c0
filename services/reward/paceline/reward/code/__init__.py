"""Scoring of answers that are programs, by running them."""
