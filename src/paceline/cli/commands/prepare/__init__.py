"""Commands before a run: write, check and try what it needs."""
