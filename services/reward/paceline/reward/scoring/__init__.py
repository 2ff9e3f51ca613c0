"""What every scorer is made of: its interface, the score of an item, how a value enters the sum."""
