"""Converts verl's keys to ours."""
