"""The files of a run in its directory: checkpoints, metrics, and samples for people."""
