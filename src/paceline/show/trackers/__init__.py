"""Sends a run's numbers and samples to experiment trackers."""
