"""Plans who sends what to whom in which round of a push."""
