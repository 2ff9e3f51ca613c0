"""Rewards and environments as servers of their own."""
