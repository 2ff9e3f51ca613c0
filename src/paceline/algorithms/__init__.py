"""Advantages, policy losses, KL and statistics: pure functions of tensors that any program can import."""
