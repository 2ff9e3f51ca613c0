"""Reads tool calls from answers and runs the tools in processes of their own."""
