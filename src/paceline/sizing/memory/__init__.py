"""The memory of GPUs by phase: of a learner rank, of a run, and the forms that fit."""
