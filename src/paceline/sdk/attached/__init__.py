"""Attaches rewards and environments to a run; they need no port."""
