"""Compares the files beside the journal with the journal."""
