"""Tells how a process is: logs, traces, metrics, and where they are read."""
