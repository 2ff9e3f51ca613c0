"""Loads the user's own losses, estimators and algorithms, checks their calls, and tries them before a run."""
