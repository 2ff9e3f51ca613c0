"""What a metric's callback returns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from paceline.service.observability.metrics import Metric

Observation = tuple[float, Mapping[str, str]]
"""A value and its labels."""

Observer = Callable[[], Iterable[Observation]]
"""Called when the metrics are read, from the reader's thread; a series that it leaves out is not exported."""

Observe = Callable[[Metric, Observer], None]
