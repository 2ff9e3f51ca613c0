"""Scoring by services that somebody else runs."""
