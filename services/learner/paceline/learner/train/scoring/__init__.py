"""Turns the rows' headers into scored micro-batches."""
