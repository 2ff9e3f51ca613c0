"""Child processes that run a user's code: starts, feeds, observes and kills them."""
