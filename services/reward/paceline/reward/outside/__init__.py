"""Calls to services outside of the run, which may be away for a while."""
