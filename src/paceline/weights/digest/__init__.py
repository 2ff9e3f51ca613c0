"""Digests of parameters that add up over shards, and their comparison."""
