"""The sections of a run's configuration, what follows from them together, and what they must agree on."""
