"""Records chosen training steps with torch's profiler, as files in the run directory."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from paceline.config.services import ProfileConfig

log = logging.getLogger(__name__)


class StepProfiler:
    """Profiles the steps of a rank.

    Args:
        folder: folder for the files, `step_NNNNNN.learner-RANK.json.gz`.
    """

    def __init__(self, config: ProfileConfig, folder: Path, rank: int) -> None:
        self._steps = frozenset(config.steps if rank in config.ranks else ())
        self._folder, self._rank = folder, rank

    @contextmanager
    def recording(self, step: int) -> Iterator[None]:
        """Records the block if the step is to be profiled; a full disk loses only the profile."""
        if step not in self._steps:
            yield
            return
        with torch.profiler.profile() as profile:
            yield
        path = self._folder / f"step_{step:06d}.learner-{self._rank}.json.gz"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            profile.export_chrome_trace(str(path))
        except (OSError, RuntimeError) as error:
            log.warning("no profile of step %d: %s", step, error)
        else:
            log.info("profile of step %d: %s", step, path)
