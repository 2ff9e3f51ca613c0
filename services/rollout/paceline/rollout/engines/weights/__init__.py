"""Finds where each part of a learner's tensor lands in a live model, from the engine's own loading."""
