"""Weights from the learner to the rollout servers: groups, pushes, blame."""
