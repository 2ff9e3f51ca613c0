"""The loop of a run, its phases, and what it leaves on disk."""
