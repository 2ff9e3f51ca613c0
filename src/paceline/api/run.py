"""A run directory as tables: metrics, samples, events, configuration."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from paceline.core.errors import DataError
from paceline.runs import run_dir as run_dirs
from paceline.show.report.lines import read_jsonl

_PORTION = 1000
"""Lines of metrics.jsonl that are held at once as Python numbers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedRun:
    """The records that a run has written so far.

    Attributes:
        config: config.resolved.yaml.
        metrics: a pyarrow.Table with a row per step and a column per metric; null if a step has none.
        events: the journal in order; each iteration reads it again.
    """

    run_dir: Path
    config: Mapping[str, Any]
    metrics: Any
    events: Iterable[Mapping[str, Any]]

    def samples(self, step: int, *, validation: bool = False) -> Any:
        """Returns the trajectories of a step, or those of the validation after it, as a pyarrow.Table.

        Raises:
            DataError: no trajectories were saved (trainer.save_trajectories), or no validation followed the
                step.
        """
        import pyarrow.parquet

        path = samples_file(self.run_dir, step, validation=validation)
        if not path.is_file():
            raise DataError(f"{self.run_dir} has no {path.name}: there are no samples of that step")
        return pyarrow.parquet.read_table(path)


def load_run(run: str | Path | None = None) -> LoadedRun:
    """Reads a run that has ended or is going on.

    Args:
        run: the run's directory, or its name under runs/; None for the latest one.

    Raises:
        ConfigError: there is no such run.
        DataError: the folder holds no run.
    """
    run_dir = run_dirs.find(None if run is None else str(run))
    config = run_dir / run_dirs.RESOLVED
    if not config.is_file():
        raise DataError(f"{run_dir} holds no run (no {config.name}); give a run directory")
    return LoadedRun(
        run_dir=run_dir,
        config=yaml.safe_load(config.read_text(encoding="utf-8")),
        metrics=_table(run_dir / "metrics.jsonl"),
        events=_Events(run_dir / "events.jsonl"),
    )


@dataclass(frozen=True, slots=True)
class _Events:
    """A journal's events, read one by one, because a long run has too many to hold in memory."""

    path: Path

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        return read_jsonl(self.path)


def _table(path: Path) -> Any:
    """Returns the lines of a file as a table, with a column for each name in any of them."""
    import pyarrow

    lines, parts = read_jsonl(path), []
    while rows := list(islice(lines, _PORTION)):
        # from_pylist takes only the columns of the first row.
        names = dict.fromkeys(name for row in rows for name in row)
        parts.append(pyarrow.table({name: [row.get(name) for row in rows] for name in names}))
    if not parts:
        return pyarrow.table({})
    return pyarrow.concat_tables(parts, promote_options="permissive").combine_chunks()


def samples_file(run_dir: Path, step: int, *, validation: bool = False) -> Path:
    """Returns the file with the trajectories of a step."""
    return run_dir / "trajectories" / f"{'val' if validation else 'step'}_{step:06d}.parquet"
