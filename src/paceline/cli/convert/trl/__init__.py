"""TRL's keys and ours."""
