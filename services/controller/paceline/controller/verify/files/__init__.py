"""Whether what lies on disk beside the journal is what the journal says."""
