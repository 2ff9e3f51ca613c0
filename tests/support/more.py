"""Cases of a parametrized test that `make test` leaves to `make test-more`."""

from __future__ import annotations

from typing import Any

import pytest


def more(*cases: Any) -> list[Any]:
    """The cases with the marker `more`; a tuple is a case of several values."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.more)
        for case in cases
    ]
