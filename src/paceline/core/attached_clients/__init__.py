"""Clients that attach to a service: what they say, and which of them works on what."""
