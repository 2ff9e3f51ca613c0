"""The records of a run: events, metrics, the manifest of a checkpoint."""
