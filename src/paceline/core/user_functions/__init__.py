"""Functions written by the user: how they are found, called and checked."""
