"""Commands that talk to a live run or service."""
