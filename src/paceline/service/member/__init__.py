"""Makes a process a member of a run's fleet, and ends it in order."""
