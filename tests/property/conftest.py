"""Property tests have no deadline per example: a busy machine is no failure, and pytest's timeout bounds the test."""

from hypothesis import settings

settings.register_profile("paceline", deadline=None)
settings.load_profile("paceline")
