"""Sections of what training does: the algorithm, its losses, the updates and their memory."""
