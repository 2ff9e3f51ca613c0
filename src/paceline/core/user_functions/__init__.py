"""Functions of the user's own: how they are found, what they are called with, what they may return."""
