"""Lets clients from outside work for a service over a stream that they keep open."""
