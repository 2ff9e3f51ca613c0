"""Commands used before a run: they write, check and try out what it needs."""
