"""One training step: score, advantages, update."""
