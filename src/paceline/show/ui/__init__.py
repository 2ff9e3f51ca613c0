"""Serves the pages of runs to a browser, read-only."""
