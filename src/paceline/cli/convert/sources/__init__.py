"""Reads files of other programs that are not YAML: shell and Python scripts."""
