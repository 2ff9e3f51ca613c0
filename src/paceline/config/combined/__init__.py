"""The sections of a run's configuration, what follows from several of them, and what they must agree on."""
