"""Who sends what to whom, in which round."""
