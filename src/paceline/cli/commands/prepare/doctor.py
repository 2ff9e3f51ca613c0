"""`paceline doctor`: what this machine offers, what it lacks, and how to get it."""

from __future__ import annotations

import argparse

from rich.console import Console
from rich.table import Table
from rich.text import Text

from paceline.checks.environment import Status, examine

_STYLES = {Status.OK: "green", Status.LACKING: "red", Status.NOTE: "yellow"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Does nothing: this command has no arguments."""


def run(_args: argparse.Namespace) -> int:
    """Prints the table; returns 1 if something is lacking."""
    findings = examine()
    table = Table(box=None, pad_edge=False)
    for header in ("", "part", "found", "what to do"):
        table.add_column(header, overflow="fold")  # long paths wrap; nothing is truncated
    for finding in findings:
        status = Text(finding.status.value, style=_STYLES[finding.status])
        table.add_row(status, finding.part, finding.state, finding.hint)
    # Brackets in a hint are not markup: pip install "paceline[gpu]".
    Console(highlight=False, markup=False).print(table)
    lacking = [finding.part for finding in findings if finding.status is Status.LACKING]
    print(f"lacking: {', '.join(lacking)}" if lacking else "this machine can run all four services")
    return 1 if lacking else 0
