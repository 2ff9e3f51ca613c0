"""Scoring by clients that have attached to this service."""
