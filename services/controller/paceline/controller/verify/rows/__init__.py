"""Rows that a step trains: as files of trajectories must have them, and those that are trained again."""
