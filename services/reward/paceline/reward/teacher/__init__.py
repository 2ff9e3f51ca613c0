"""A served teacher that is asked for its likeliest tokens beside the scorers."""
