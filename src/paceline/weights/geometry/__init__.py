"""Which part of which tensor lies where."""
