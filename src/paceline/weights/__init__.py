"""Which part of which tensor lies where, what must move in a weight push, and the proof that it arrived."""
