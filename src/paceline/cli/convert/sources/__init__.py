"""Files of other programs that are no YAML: scripts of a shell and of Python."""
