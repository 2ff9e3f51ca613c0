"""The loop of a run, its phases, and the files that it writes."""
