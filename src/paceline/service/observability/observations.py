"""Types of the callbacks that return a metric's values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from paceline.service.observability.metrics import Metric

Observation = tuple[float, Mapping[str, str]]
"""A value and its labels."""

Observer = Callable[[], Iterable[Observation]]
"""Called in the reader's thread when the metrics are read; series that it omits are not exported."""

Observe = Callable[[Metric, Observer], None]
