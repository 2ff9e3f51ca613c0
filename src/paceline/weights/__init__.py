"""Who holds which part of which tensor, what has to move where, and how to prove that it arrived."""
