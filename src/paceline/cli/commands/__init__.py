"""The sub-commands of `paceline`, one module each."""
