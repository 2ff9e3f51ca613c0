"""Inference engines behind one protocol; each engine is a folder."""
