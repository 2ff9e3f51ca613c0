"""Advantages, policy losses, KL and statistics: pure functions of tensors, which any program may import."""
