"""Scoring by remote reward services."""
