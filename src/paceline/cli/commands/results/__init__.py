"""Commands that read what a run has written."""
