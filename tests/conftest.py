"""What holds for every test: examples take the time that they need, and logging is as it was before.

What is imported for the tests stays, so that the garbage collector need not look at it.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterator

import pytest
from hypothesis import HealthCheck, settings

from paceline.service.imports import without_collections

# Examples have no deadline and may be slow to draw: a busy machine is no failure. pytest bounds each test.
# All runs draw the same ones, so that a failure is the commit's; `--hypothesis-profile=search` draws others.
SAME = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
settings.register_profile("paceline", SAME)
settings.register_profile("search", SAME, derandomize=False)
settings.load_profile("paceline")

LOGGERS = (None, "paceline", "opentelemetry")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    with without_collections():
        return (yield)


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
