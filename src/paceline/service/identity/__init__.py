"""Proves who a process is: the run's token, scoped tokens, certificates."""
