"""Loads and shards the networks, and computes their layers."""
