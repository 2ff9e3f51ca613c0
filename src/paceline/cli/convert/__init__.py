"""Configurations of verl and TRL as ours."""
