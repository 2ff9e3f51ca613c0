"""Losses, estimators and algorithms of the user's own: found, called with checks, and tried before a run."""
