"""Clients that attach to a service: their messages, and the assignment of tasks to them."""
