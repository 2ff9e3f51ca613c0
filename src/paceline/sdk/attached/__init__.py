"""Rewards and environments that attach to a run, without a port of their own."""
