"""The memory of GPUs by phase: that of a learner rank, and that of a run."""
