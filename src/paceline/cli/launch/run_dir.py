"""A run's folder: its configuration, its logs, and the note that tells where its controller is."""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil

from paceline.config.load import dump_yaml
from paceline.config.run import RunConfig
from paceline.core.errors import ConfigError, EnvironmentLackError
from paceline.core.ids import new_run_id
from paceline.service.process import write_atomically

RUNS = Path("runs")
LATEST = "latest"
NOTE = "run.json"


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
        """Whether the launcher that wrote this still runs; a later process with its pid does not count."""
        if self.state == "ended":
            return False
        try:
            return abs(psutil.Process(self.launcher_pid).create_time() - self.launcher_started) < 1
        except psutil.NoSuchProcess:
            return False


def prepare(config: RunConfig) -> tuple[RunConfig, Path]:
    """Makes the run directory with config.resolved.yaml; returns the configuration with trainer.run_dir set.

    Raises:
        EnvironmentLackError: the folder cannot be written, or another launcher runs in it.
    """
    folder = (
        Path(config.trainer.run_dir) if config.trainer.run_dir else RUNS / new_run_id(config.trainer.name)
    )
    run_dir = folder.resolve()
    try:
        (run_dir / "logs").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EnvironmentLackError(
            f"cannot make the run directory {run_dir}: {error.strerror}; set trainer.run_dir"
        ) from error
    note = read_note(run_dir)
    if note is not None and note.alive:
        raise EnvironmentLackError(
            f"{run_dir} belongs to a run that is under way (process {note.launcher_pid}); stop it, or set "
            "another trainer.run_dir"
        )
    trainer = config.trainer.model_copy(update={"run_dir": str(run_dir)})
    resolved = config.model_copy(update={"trainer": trainer})
    secret = "@" in (config.broker.url or "")
    write_atomically(run_dir / "config.resolved.yaml", dump_yaml(resolved), mode=0o600 if secret else 0o644)
    _link_latest(run_dir)
    return resolved, run_dir


def new_note(run_dir: Path, token: str) -> RunNote:
    """A note for a run that this process launches."""
    launcher = psutil.Process()
    return RunNote(
        run_dir=str(run_dir),
        launcher_pid=launcher.pid,
        launcher_started=launcher.create_time(),
        token=token,
    )


def write_note(run_dir: Path, note: RunNote) -> None:
    """Writes run.json, readable by its owner only: it holds the token."""
    write_atomically(run_dir / NOTE, json.dumps(asdict(note), indent=1), mode=0o600)


def end_note(run_dir: Path, note: RunNote, message: str) -> None:
    """Marks the run as ended and removes the token."""
    note.state, note.message, note.token, note.pids = "ended", message, "", {}
    write_note(run_dir, note)


def read_note(run_dir: Path) -> RunNote | None:
    """The note in a run directory; None if there is none or it cannot be read."""
    try:
        return RunNote(**json.loads((run_dir / NOTE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def find(run: str | None) -> Path:
    """The folder of a run: a path, a name under runs/, or the latest.

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


def _link_latest(run_dir: Path) -> None:
    """Points runs/latest to the newest run, if the file system has symlinks."""
    link = run_dir.parent / LATEST
    if link.exists() and not link.is_symlink():
        return
    partial = link.with_name(f".{LATEST}.{os.getpid()}")
    with contextlib.suppress(OSError):
        partial.symlink_to(run_dir.name)
        partial.replace(link)
