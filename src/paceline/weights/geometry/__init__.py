"""Describes which rank holds which part of a tensor."""
