"""verl's keys and ours."""
