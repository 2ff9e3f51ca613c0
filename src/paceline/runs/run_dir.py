"""Prepares a run's folder: its configuration, its logs, and the note with its controller's address."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
import yaml

from paceline.config.load import dump_yaml
from paceline.config.run import RunConfig
from paceline.core.errors import ConfigError, EnvironmentLackError
from paceline.core.run_record.manifest import MANIFEST
from paceline.data.hub import pinned_run
from paceline.service.disk import writing
from paceline.service.process import write_atomically
from paceline.storage.places import checkpoints_of

RUNS = Path("runs")
LATEST = "latest"
NOTE = "run.json"
TARGETS = "prometheus-targets.json"
RESOLVED = "config.resolved.yaml"
EXPORTING = "exporting"
"""The state of a run that has ended, while its model is written."""
START = "config.start.yaml"
"""The configuration that the controller gets; it keeps a copy as RESOLVED once it accepts the run."""

_STARTS = ("actor.optim.warmup_steps_ratio", "critic.optim.warmup_steps_ratio", "critic.path")
"""Keys that matter only at the start of a run; its checkpoints hold their effect (docs/reliability.md)."""
_KL_TYPE = "algorithm.kl_ctrl.type"

_OUTSIDE = ("broker.url", "trainer.checkpoint_url")
"""The places outside its folder to which a run writes, by its id."""

_HUB_NAME = re.compile(r"hf://[^\s,\]'\"]+")


@dataclass(kw_only=True, slots=True)
class RunNote:
    """run.json: the processes of the run in this folder. The token is removed once the run has ended."""

    run_dir: str
    launcher_pid: int
    launcher_started: float
    controller: str = ""
    token: str = ""
    pids: dict[str, int] = field(default_factory=dict)
    state: str = "starting"
    message: str = ""

    @property
    def alive(self) -> bool:
        """Whether the run goes on: the launcher that wrote this still runs."""
        return self.state not in ("ended", EXPORTING) and self._has_process()

    @property
    def exporting(self) -> bool:
        """Whether the run has ended, and its launcher still writes the model."""
        return self.state == EXPORTING and self._has_process()

    def _has_process(self) -> bool:
        """Returns whether the launcher runs; a later process with its pid does not count."""
        try:
            return abs(psutil.Process(self.launcher_pid).create_time() - self.launcher_started) < 1
        except psutil.NoSuchProcess:
            return False


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """A run directory, the configuration that its services get, and remarks about both.

    Attributes:
        created: the folders that were made for it, the outermost first.
        aside: where an earlier run was moved.
    """

    config: RunConfig
    run_dir: Path
    remarks: list[str]
    created: tuple[Path, ...] = ()
    aside: Path | None = None

    def undo(self) -> None:
        """Undoes the preparation, after a start that failed before the run began."""
        if self.created or self.aside is not None:
            shutil.rmtree(self.run_dir, ignore_errors=True)
        if self.aside is not None:
            self.aside.rename(self.run_dir)
        for folder in reversed(self.created):
            with contextlib.suppress(OSError):
                folder.rmdir()


def folder_of(config: RunConfig) -> Path:
    """Returns trainer.run_dir, else a folder that depends only on trainer.name."""
    return Path(config.trainer.run_dir) if config.trainer.run_dir else RUNS / config.trainer.name


def prepare(config: RunConfig) -> Prepared:
    """Makes the run directory with config.start.yaml, or takes that of an interrupted run.

    With trainer.resume=never an earlier run is moved aside. The services always get `resume: auto`, so a
    restarted service continues this run.

    Raises:
        ConfigError: the folder holds a run that has finished, or a copy of a running one that writes to the
            same places outside the folder.
        ModelError, DataError: a name of the hub cannot be looked up.
        EnvironmentLackError: the folder cannot be written, or another launcher runs or writes a model in it.
    """
    run_dir = folder_of(config).resolve()
    note = read_note(run_dir)
    original = None if note is None else _original_of(run_dir, note)
    if note is not None and note.alive and original is None:
        raise EnvironmentLackError(
            f"{run_dir} belongs to a run that is still running (process {note.launcher_pid}); stop it, or "
            "set "
            "another trainer.run_dir"
        )
    if note is not None and note.exporting:
        raise EnvironmentLackError(
            f"the run in {run_dir} has ended, but process {note.launcher_pid} is still writing its model; "
            "try again when that is done, or set another trainer.run_dir"
        )
    trainer = config.trainer.model_copy(update={"run_dir": str(run_dir), "resume": "auto"})
    resolved = pinned_run(config, _pinned_names(run_dir) if config.trainer.resume == "auto" else ())
    resolved = resolved.model_copy(update={"trainer": trainer})
    aside, remarks = None, []
    try:
        if config.trainer.resume == "never":
            aside = _move_aside(run_dir)
            remarks += [f"moved the earlier run to {aside}"] if aside is not None else []
        else:
            if original is not None and original.alive:
                remarks.append(_remark_on_copy(run_dir, Path(original.run_dir), resolved))
            remarks += _remarks_on(run_dir, resolved)
        created = tuple(folder for folder in (*reversed(run_dir.parents), run_dir) if not folder.exists())
        (run_dir / "logs").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EnvironmentLackError(
            f"cannot make the run directory {run_dir}: {error.strerror}; set trainer.run_dir"
        ) from error
    secret = config.broker.has_secrets
    write_atomically(run_dir / START, dump_yaml(resolved), mode=0o600 if secret else 0o644)
    return Prepared(config=resolved, run_dir=run_dir, remarks=remarks, created=created, aside=aside)


def _pinned_names(run_dir: Path) -> list[str]:
    """Returns the names of the hub, with their commits, of the run's last start."""
    try:
        return _HUB_NAME.findall((run_dir / RESOLVED).read_text(encoding="utf-8"))
    except OSError:
        return []


def checkpoint_steps(config: RunConfig, run_dir: Path) -> list[int]:
    """Steps with a complete checkpoint, ascending; a checkpoint's manifest is written last.

    Raises:
        OSError: the folder of the checkpoints cannot be read.
    """
    root = checkpoints_of(config, run_dir)
    names = [name for name in root.folders() if name.startswith("step_")]
    return sorted(int(name.removeprefix("step_")) for name in names if root.child(name).has(MANIFEST))


def newest_checkpoint(config: RunConfig, run_dir: Path) -> int | None:
    """Returns the step of the newest complete checkpoint; None if there is none or it is unreachable."""
    try:
        return max(checkpoint_steps(config, run_dir), default=None)
    except OSError:
        return None


def _move_aside(run_dir: Path) -> Path | None:
    """Renames a folder in which a run was started; returns where it is now."""
    if not (run_dir / RESOLVED).exists():
        return None
    number = 1
    while (aside := run_dir.with_name(f"{run_dir.name}.{number}")).exists():
        number += 1
    run_dir.rename(aside)
    return aside


def _remarks_on(run_dir: Path, config: RunConfig) -> list[str]:
    """Returns remarks for the user about the run that `config` continues."""
    step = newest_checkpoint(config, run_dir)
    if step is None:
        return []
    total_steps = config.trainer.num_steps
    # The checkpoint of the last step is written before the step is finished.
    if step >= total_steps and _last_metrics(run_dir) >= total_steps:
        raise ConfigError(
            f"the run in {run_dir} has finished its {total_steps} steps; a greater trainer.total_steps "
            "continues it, trainer.resume=never moves it aside and begins again, and another trainer.name or "
            "trainer.run_dir keeps both"
        )
    hint = "it goes on (trainer.resume=never: begin again)"
    remarks = [f"{run_dir} holds a run with a checkpoint of step {step}: {hint}"]
    changes, kept = _changes(run_dir, config)
    if changes:
        remarks.append(f"changed since its last start: {', '.join(changes)}")
    if kept:
        remarks.append(f"without effect, because the run continues from its checkpoint: {', '.join(kept)}")
    return remarks


def _original_of(run_dir: Path, note: RunNote) -> RunNote | None:
    """Returns the note of the run of which `run_dir` is a copy; None if it is not a copy."""
    original = read_note(Path(note.run_dir))
    is_copy = original is not None and original.launcher_started == note.launcher_started
    return original if is_copy and not Path(note.run_dir).samefile(run_dir) else None


def _remark_on_copy(run_dir: Path, original: Path, config: RunConfig) -> str:
    """Returns a remark about a copy whose original is still running.

    Raises:
        ConfigError: both would write to the same place, because they have the same run id.
    """
    before = _flat(read_tree(original / START))
    after = _flat(config.model_dump(mode="json"))
    shared = [key for key in _OUTSIDE if after[key] is not None and before.get(key) == after[key]]
    if shared:
        raise ConfigError(
            f"{run_dir} is a copy of the run in {original}, which is still running and has the same id; with "
            f"the same {' and '.join(shared)}, each would overwrite the other's files: stop that run, or "
            f"give this one another {' and another '.join(shared)}"
        )
    return f"{run_dir} is a copy of the run in {original}, which is still running independently"


def _last_metrics(run_dir: Path) -> int:
    """Returns the last step that has a complete line in metrics.jsonl; -1 without one."""
    try:
        lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        # The last lines may be those of validations of earlier steps.
        return max((int(json.loads(line)["step"]) for line in lines[-4:] if line.endswith("}")), default=-1)
    except (OSError, ValueError, KeyError):
        return -1


def _changes(run_dir: Path, config: RunConfig) -> tuple[list[str], list[str]]:
    """Returns keys that changed since the run's last start: those that take effect, and those that do not."""
    old, new = _flat(read_tree(run_dir / RESOLVED)), _flat(config.model_dump(mode="json"))
    # Addresses of services and the broker, which has a password, may well differ.
    changed = [
        key
        for key, value in new.items()
        if key in old and old[key] != value and not key.startswith(("broker.", "service."))
    ]
    state = set(_STARTS)
    if old.get(_KL_TYPE) == new[_KL_TYPE] == "adaptive":
        state.add("algorithm.kl_ctrl.kl_coef")
    return (
        [f"{key} {old[key]} -> {new[key]}" for key in changed if key not in state],
        [f"{key} {old[key]} -> {new[key]}" for key in changed if key in state],
    )


def read_tree(path: Path) -> dict[str, Any]:
    """Returns the configuration in a run's folder as plain values; {} if it cannot be read."""
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError):
        return {}
    return tree if isinstance(tree, dict) else {}


def _flat(tree: object, prefix: str = "") -> dict[str, object]:
    """Lists the leaves of a tree by dotted key."""
    if not isinstance(tree, dict):
        return {prefix: tree}
    leaves: dict[str, object] = {}
    for key, value in tree.items():
        leaves |= _flat(value, f"{prefix}.{key}" if prefix else str(key))
    return leaves


def write_targets(run_dir: Path, targets: list[dict[str, Any]]) -> Path:
    """Writes the processes' metrics endpoints for Prometheus' file_sd_configs; returns the file."""
    path = run_dir / TARGETS
    write_atomically(path, json.dumps(targets, indent=1) + "\n")
    return path


def new_note(run_dir: Path, token: str) -> RunNote:
    """Makes a note for a run that this process launches."""
    launcher = psutil.Process()
    return RunNote(
        run_dir=str(run_dir), launcher_pid=launcher.pid, launcher_started=launcher.create_time(), token=token
    )


def write_note(run_dir: Path, note: RunNote) -> None:
    """Writes run.json, readable by its owner only: it holds the token."""
    with writing(run_dir):
        write_atomically(run_dir / NOTE, json.dumps(asdict(note), indent=1), mode=0o600)


def end_note(run_dir: Path, note: RunNote, message: str) -> None:
    """Marks the run as ended and removes the token."""
    note.state, note.message, note.token, note.pids = "ended", message, "", {}
    write_note(run_dir, note)


@contextlib.contextmanager
def exporting(run_dir: Path) -> Iterator[None]:
    """Keeps other launchers out of the folder of an ended run while its model is written."""
    note = read_note(run_dir)

    def say(state: str) -> None:
        if note is not None:
            with contextlib.suppress(EnvironmentLackError):  # the disk is full, as the export's line says
                write_note(run_dir, replace(note, state=state))

    say(EXPORTING)
    try:
        yield
    finally:
        say("ended")


def read_note(run_dir: Path) -> RunNote | None:
    """Returns the note in a run directory; None if there is none or it cannot be read."""
    try:
        return RunNote(**json.loads((run_dir / NOTE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def find(run: str | None) -> Path:
    """Returns the folder of a run: a path, a name under runs/, or the latest.

    Raises:
        ConfigError: there is no such run.
    """
    candidates = [RUNS / LATEST] if run is None else [Path(run), RUNS / run]
    for folder in candidates:
        if folder.is_dir():
            return folder.resolve()
    known = sorted(path.name for path in RUNS.iterdir() if path.is_dir()) if RUNS.is_dir() else []
    hint = f"runs/ holds {', '.join(known)}" if known else "there is no folder runs/ here"
    raise ConfigError(
        f"no run {run or 'runs/latest'}; give the path of a run directory, or a name under runs/ ({hint})"
    )


def link_latest(run_dir: Path) -> None:
    """Points runs/latest to the newest run, if the file system has symlinks."""
    link = run_dir.parent / LATEST
    if link.exists() and not link.is_symlink():
        return
    partial = link.with_name(f".{LATEST}.{os.getpid()}")
    with contextlib.suppress(OSError):
        partial.symlink_to(run_dir.name)
        partial.replace(link)
