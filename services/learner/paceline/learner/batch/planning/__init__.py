"""Plans which rows a rank takes in which order, packed into bins of nearly equal arithmetic."""
