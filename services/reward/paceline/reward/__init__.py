"""The reward service: scores trajectories in killable child processes or through remote services."""
