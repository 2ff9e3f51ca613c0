"""The members of a run: who is alive, and how they are called."""
