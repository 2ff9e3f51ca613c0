"""Reads tool calls from answers and runs the tools in child processes."""
