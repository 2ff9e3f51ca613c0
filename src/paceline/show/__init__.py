"""Shows a run to people: live, as a page, through trackers."""
