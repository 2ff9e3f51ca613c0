"""`paceline status`: asks a run's controller what the run is doing."""

from __future__ import annotations

import argparse
import asyncio

from rich.console import Console
from rich.table import Table

from paceline.cli.commands import arguments
from paceline.cli.controller_client import ControllerClient, RunStatus
from paceline.cli.launch import run_dir as run_dirs
from paceline.cli.live.view import phase_words, step_line
from paceline.core.errors import ConfigError
from paceline.service.process import env_token


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this command's arguments."""
    arguments.add_run(parser)
    parser.add_argument(
        "--controller",
        metavar="HOST:PORT",
        help="ask this controller instead; the token is read from PACELINE_TOKEN",
    )


def run(args: argparse.Namespace) -> int:
    """Prints what the controller answers; returns 1 if the run is not up."""
    if args.controller:
        address, token = args.controller, env_token()
    else:
        folder = run_dirs.find(args.run_name)
        note = run_dirs.read_note(folder)
        if note is None:
            raise ConfigError(
                f"{folder} was not started by `paceline train`; give --controller HOST:PORT and set "
                "PACELINE_TOKEN"
            )
        if not note.alive or not note.controller:
            last = note.message or ("starting" if note.alive else "its launcher is gone")
            print(f"{folder}: {'not up yet' if note.alive else 'not running'} ({last})")
            return 1
        address, token = note.controller, note.token
    _show(asyncio.run(_ask(address, token)))
    return 0


async def _ask(address: str, token: str) -> RunStatus:
    async with ControllerClient(address, token) as controller:
        return await controller.status()


def _show(status: RunStatus) -> None:
    console = Console(highlight=False)
    now = status.now
    words = phase_words(now.phase, now.admitted, now.wanted)
    console.print(f"run       {status.run_id}\nfolder    {status.run_dir}")
    console.print(f"now       step {now.step}/{status.total_steps}: {words}, {status.seconds_in_phase:.1f} s")
    if status.policy:
        console.print(f"policy    {status.policy}")
    table = Table("member", "state", "policy", "in flight", "heard", "address", box=None, pad_edge=False)
    for member in status.members:
        policy = f"v{member.policy.version}" if member.policy else ""
        heard = f"{member.seconds_since_heartbeat:.1f} s ago"
        table.add_row(member.member_id, member.state, policy, str(member.in_flight), heard, member.address)
    console.print(table)
    if status.metrics:
        console.print(step_line(now.step, status.total_steps, status.metrics))
