"""Logs, traces and metrics of a process, and their endpoints."""
