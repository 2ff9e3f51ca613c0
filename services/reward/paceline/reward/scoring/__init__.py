"""What all scorers share: their interface, the score of an item, and how a value enters the sum."""
