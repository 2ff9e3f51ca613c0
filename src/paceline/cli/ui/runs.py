"""The runs that are served: their pages, and what each is doing now."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path
from urllib.parse import quote

from paceline.cli.controller_client import ControllerClient, RunStatus
from paceline.cli.launch import run_dir as run_dirs
from paceline.cli.live.view import phase_words
from paceline.cli.metrics import HEADLINES
from paceline.cli.report.data import read_jsonl, read_run
from paceline.cli.report.page import page
from paceline.cli.report.style import STYLE
from paceline.core.errors import PacelineError
from paceline.service.credentials import Credentials

_STATUS_S = 1.0
_FILES = ("metrics.jsonl", "events.jsonl", run_dirs.RESOLVED)


@dataclass(frozen=True, kw_only=True, slots=True)
class News:
    """What a page shows of now; it fetches itself again when the stamp of its data is another."""

    html: str
    stamp: str


class ServedRun:
    """A run directory. The controller of a run that is under way is asked at most once a second."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._asked_at, self._now = float("-inf"), ""

    def page(self) -> str:
        """The run's page."""
        return page(read_run(self.folder), stamp=self._stamp())

    async def news(self) -> News:
        """What the run is doing, and the stamp of its data."""
        if time.monotonic() - self._asked_at > _STATUS_S:
            self._now = await self._ask()
            self._asked_at = time.monotonic()
        return News(html=self._now, stamp=self._stamp())

    def _stamp(self) -> str:
        metrics, note = self.folder / "metrics.jsonl", run_dirs.read_note(self.folder)
        size = metrics.stat().st_size if metrics.exists() else 0
        return f"{size} {note.state if note else ''}"

    async def _ask(self) -> str:
        note = run_dirs.read_note(self.folder)
        if note is None or not note.alive:
            return ""
        if not note.controller:
            return "<b>starting</b>"
        try:
            async with ControllerClient(note.controller, _credentials(note.token)) as controller:
                return _status(await controller.status())
        except PacelineError as error:
            return f"<b>no answer</b> {escape(str(error))}"


class ServedRuns:
    """The run in a folder, or all runs below it, also those that begin later."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._known = folder, dict[str, ServedRun]()

    def by_name(self) -> Mapping[str, ServedRun]:
        """The runs that are there now."""
        is_one = _is_run(self._folder)
        folders = [self._folder] if is_one else sorted(filter(_is_run, self._folder.iterdir()))
        self._known = {
            path.name: self._known.get(path.name) or ServedRun(path)
            for path in folders
            if not path.is_symlink()
        }
        return self._known


def index(runs: Mapping[str, ServedRun]) -> str:
    """A page with a line and a link for each run."""
    rows = "".join(_row(name, run.folder) for name, run in runs.items()) or "<tr><td>none yet</td></tr>"
    head = "".join(f"<th>{escape(title)}</th>" for title in ("run", "step", *HEADLINES, ""))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Paceline runs</title><style>{STYLE}</style></head><body><main>"
        f'<header><p class="brand">Paceline</p><h1>Runs</h1></header>'
        f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></main></body></html>\n"
    )


def _row(name: str, folder: Path) -> str:
    metrics, note = read_jsonl(folder / "metrics.jsonl"), run_dirs.read_note(folder)
    cells = [str(metrics[-1].get("step", "")) if metrics else ""]
    for key in HEADLINES.values():
        values = [line[key] for line in metrics if isinstance(line.get(key), int | float)]
        cells.append(f"{values[0]:.3f} → {values[-1]:.3f}" if values else "")
    cells.append("running" if note and note.alive else (note.message if note else ""))
    shown = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
    return f'<tr><td><a href="{quote(name)}/">{escape(name)}</a></td>{shown}</tr>'


def _is_run(folder: Path) -> bool:
    return any((folder / name).is_file() for name in _FILES)


def _credentials(token: str) -> Credentials:
    return Credentials.from_env().for_own_machine().with_token(token)


def _status(status: RunStatus) -> str:
    now = status.now
    words = phase_words(now.phase, now.admitted, now.wanted)
    members = "".join(
        f"<span>{escape(member.member_id)} {escape(member.state)}"
        f"{f' v{member.policy.version}' if member.policy else ''}</span>"
        for member in status.members
    )
    line = f"step {now.step}/{status.total_steps}: {words}, {status.seconds_in_phase:.0f} s"
    return f'<b>training</b> {escape(line)}<div class="members">{members}</div>'
