"""A run's records of itself: events, metrics, the manifest of a checkpoint."""
