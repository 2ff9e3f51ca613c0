"""What the journal of a run says, event by event, and whether it agrees with itself."""
