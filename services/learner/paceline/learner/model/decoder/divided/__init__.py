"""What several ranks divide of a layer: its experts, its matrices."""
