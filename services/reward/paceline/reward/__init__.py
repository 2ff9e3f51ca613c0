"""The reward service: scores trajectories in killable worker processes or through remote services."""
