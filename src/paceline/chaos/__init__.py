"""Injects faults into a run and shows how it recovers."""
