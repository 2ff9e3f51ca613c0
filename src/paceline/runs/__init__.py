"""Finds a run by its folder, and asks its controller."""
