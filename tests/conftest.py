"""What every test finds as it was before the test that ran before it in the same process."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

LOGGERS = (None, "paceline", "opentelemetry")


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """Undoes what a service or a command sets up: logging is the whole process's."""
    loggers = [logging.getLogger(name) for name in LOGGERS]
    before = [(logger, logger.level, logger.propagate, logger.handlers[:]) for logger in loggers]
    yield
    for logger, level, propagate, handlers in before:
        logger.setLevel(level)
        logger.propagate = propagate
        logger.handlers[:] = handlers
