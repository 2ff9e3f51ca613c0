"""What a run leaves in its directory: checkpoints, metrics, samples for people."""
