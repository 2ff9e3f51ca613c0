"""Reads the journal of a run, event by event, and checks that it is consistent."""
