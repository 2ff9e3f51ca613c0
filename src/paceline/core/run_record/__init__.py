"""What a run says of itself: events, metrics, the manifest of a checkpoint."""
