"""The rows that a step trains: what files of trajectories must have, and which rows are trained again."""
