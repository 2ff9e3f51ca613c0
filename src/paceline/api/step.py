"""A finished step of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.api.run import samples_file


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """A finished step; step 0 is the starting model.

    Attributes:
        metrics: docs/metrics.md; None for a number that is not finite.
    """

    number: int
    metrics: Mapping[str, float | None]
    run_dir: Path

    @property
    def samples(self) -> list[dict[str, Any]]:
        """The step's trajectories, a dict each; [] if none were saved (trainer.save_trajectories)."""
        path = samples_file(self.run_dir, self.number)
        if not path.is_file():
            return []
        import pyarrow.parquet

        rows: list[dict[str, Any]] = pyarrow.parquet.read_table(path).to_pylist()
        return rows
