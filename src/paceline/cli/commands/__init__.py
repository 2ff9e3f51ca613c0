"""The sub-commands of `paceline`, one module each, in rooms by what they are for."""
