"""Starts one process, here, forked or behind a remote shell, and ends it with all that it started."""
