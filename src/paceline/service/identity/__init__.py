"""Proves a process's identity: the run's token, scoped tokens, certificates."""
