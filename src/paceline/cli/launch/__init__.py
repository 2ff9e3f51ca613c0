"""A run as local processes."""
