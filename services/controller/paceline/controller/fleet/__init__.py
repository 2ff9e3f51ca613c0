"""The members of a run: which of them are alive, and calls to them."""
