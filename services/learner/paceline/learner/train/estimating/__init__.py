"""From scores to advantages, and what is shaped around them."""
