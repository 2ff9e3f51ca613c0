"""Examines configuration, machine and data before a run begins."""
