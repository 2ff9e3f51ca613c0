"""Converts configurations of verl and TRL to ours."""
