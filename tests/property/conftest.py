"""Property tests have no deadline per example: a busy machine is no failure. pytest bounds the whole test."""

from hypothesis import settings

settings.register_profile("paceline", deadline=None)
settings.load_profile("paceline")
