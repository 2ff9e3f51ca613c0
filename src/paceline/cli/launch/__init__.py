"""Starts and stops a run as local processes."""
