"""`paceline status`: asks a run's controller what the run is doing."""

from __future__ import annotations

import argparse
import asyncio

from rich.console import Console
from rich.table import Table

from paceline.cli.commands import arguments
from paceline.cli.controller_client import ControllerClient, RunStatus
from paceline.cli.live.view import phase_words, step_line


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this command's arguments."""
    arguments.add_controller(parser)


def run(args: argparse.Namespace) -> int:
    """Prints what the controller answers; returns 1 if the run is not up."""
    controller = arguments.find_controller(args)
    if controller is None:
        return 1
    _show(asyncio.run(_ask(controller)))
    return 0


async def _ask(controller: arguments.ControllerAddress) -> RunStatus:
    async with ControllerClient(controller.address, controller.credentials) as client:
        return await client.status()


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
