"""Opens a run directory; its run is resumed if it was begun with the same data and settings."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.config.run import RunConfig
from paceline.controller.batch.inputs import Inputs
from paceline.controller.journal import Journal
from paceline.controller.run.records import checkpoints
from paceline.controller.standing import Standing
from paceline.controller.verify.journal.term import Term
from paceline.core.clock import Clock
from paceline.core.digest import file_digest
from paceline.core.errors import ConfigError
from paceline.core.ids import run_id_for
from paceline.core.user_functions.user_function import source_file
from paceline.service.member.run_directory import write_run_id
from paceline.storage.places import checkpoints_of

log = logging.getLogger(__name__)

JOURNAL = "events.jsonl"


def open_run(
    run_dir: Path, config: RunConfig, inputs: Inputs, clock: Clock
) -> tuple[Journal, str, list[str]]:
    """Opens the journal and begins a term.

    Returns:
        The journal, to which the event `run` was written; the run's id; and sentences for people on how the
        run was resumed.

    Raises:
        ConfigError: another controller works in this directory, or its run may not be resumed, because it was
            begun with other data or settings, or trainer.resume is never.
    """
    journal = Journal(run_dir / JOURNAL, clock)
    has_files = any((run_dir / name).exists() for name in ("checkpoints", "metrics.jsonl"))
    if config.trainer.resume == "never" and (journal.term > 1 or has_files):
        raise ConfigError(
            f"{run_dir} holds an earlier run, and trainer.resume is never: move it away, or choose another "
            "trainer.run_dir (`paceline train` moves it aside)"
        )
    standing = journal.standing
    _check_same(run_dir, standing, inputs.digest, _settings(config))
    if not (run_id := standing.run_id):
        # Only the checkpoints of a run may be left.
        left = (state.run_id for _, state in checkpoints.complete(checkpoints_of(config, run_dir)))
        run_id = next(left, "") or run_id_for(run_dir.name, config.trainer.name)
    write_run_id(run_dir, run_id)
    earlier = standing.code
    begin_term(journal, run_id, config, inputs)
    log.info("controller number %d of run %s: %s", journal.term, run_id, standing)
    return journal, run_id, list(_changes(earlier, journal.standing.code))


def begin_term(journal: Journal, run_id: str, config: RunConfig, inputs: Inputs) -> None:
    """Journals that a controller begins, with its settings."""
    journal.record(
        "run",
        run_id=run_id,
        term=journal.term,
        step=max(0, journal.standing.finished),
        data_digest=inputs.digest,
        settings=_settings(config),
        code=_own_code(config),
        verify=Term.of(config, inputs.cursor).to_plain(),
        pid=os.getpid(),
    )


def _own_code(config: RunConfig) -> dict[str, list[str]]:
    """Returns reference and file digest of the user's own code, by key; "" if the file is not on this host.

    The digests are BLAKE2b, as in the terms before, with which they are compared.
    """
    files = {key: source_file(reference) for key, reference in config.own_code.items()}
    return {
        key: [reference, "" if (file := files[key]) is None else file_digest(file, like="")]
        for key, reference in config.own_code.items()
    }


def _changes(before: Mapping[str, Sequence[str]], now: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Returns the changes of the user's own code since the last start."""
    for key, (reference, digest) in now.items():
        earlier, known = before.get(key, (reference, digest))
        if (earlier, known) != (reference, digest):
            what = "its file was another" if earlier == reference else f"it was {earlier}"
            yield f"{key}={reference}: {what} when this run was last started; it goes on with this one"


def _settings(config: RunConfig) -> dict[str, Any]:
    """Returns the settings that must not change within a run, by key: those of prompts and answers."""
    data, rollout = config.data, config.rollout
    sampling = config.algorithm.dynamic_sampling
    return {
        "trainer.seed": config.trainer.seed,
        "data.seed": data.seed,
        "data.shuffle": data.shuffle,
        "data.order_by": data.order_by,
        "data.train_sets (weights by step)": [[of.step, list(of.weights)] for of in data.weights_by_step],
        "data.train_batch_size": data.train_batch_size,
        "data.max_response_length": data.max_response_length,
        "rollout.n": rollout.n,
        "rollout.temperature": rollout.temperature,
        "algorithm.dynamic_sampling.enable": sampling.enable,
        "barrier.max_staleness": config.barrier.bound,
        **({"rollout.in_flight": config.rollout.in_flight} if config.pushes_in_flight else {}),
    }


def _check_same(run_dir: Path, standing: Standing, digest: str, settings: Mapping[str, Any]) -> None:
    if standing.data_digest and standing.data_digest != digest:
        raise ConfigError(
            f"the run in {run_dir} was begun with other data: its prompts, or the "
            "columns that rewards use, have changed. Go on with the same data, choose another "
            "trainer.run_dir, or set trainer.resume: never"
        )
    changed = [
        f"{key}={settings[key]!r} instead of {value!r}"
        for key, value in standing.settings.items()
        if key in settings and settings[key] != value
    ]
    if changed:
        raise ConfigError(
            f"the run in {run_dir} was begun with other settings: now {', '.join(changed)}. Set them back, "
            "choose another trainer.run_dir, or set trainer.resume: never"
        )
