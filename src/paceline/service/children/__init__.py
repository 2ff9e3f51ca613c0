"""Child processes that run code of the user's: started, fed over pipes, observed, killed."""
