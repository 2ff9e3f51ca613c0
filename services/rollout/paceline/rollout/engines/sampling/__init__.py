"""Draws tokens by seed and position, for every engine."""
