"""Converts TRL's keys to ours."""
