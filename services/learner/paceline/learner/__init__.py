"""The learner: an FSDP2 group that trains on a step's batch and publishes its weights."""
