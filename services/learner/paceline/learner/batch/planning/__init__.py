"""Which rows a rank takes in which order: their arithmetic, packed into bins of nearly equal work."""
