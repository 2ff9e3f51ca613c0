"""`paceline status`: asks a run's controller what it is doing, once or until the run ends."""

from __future__ import annotations

import argparse
import asyncio
import sys

from rich.console import Console
from rich.table import Table

from paceline.cli.commands import arguments
from paceline.core.run_record.run_events import EndEvent
from paceline.runs.controller_client import ControllerClient, RunStatus
from paceline.show.live.follow import follow
from paceline.show.live.view import PlainView, phase_words, step_line

_PATIENCE_S = 300.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of this command."""
    arguments.add_controller(parser)
    parser.add_argument(
        "--follow",
        action="store_true",
        help="print every step until the run ends; the exit code is 0 if it ends in order, else 1",
    )
    parser.add_argument(
        "--patience",
        type=float,
        default=_PATIENCE_S,
        metavar="SECONDS",
        help="with --follow: seconds to wait for a silent controller (default: %(default)g)",
    )


def run(args: argparse.Namespace) -> int:
    """Prints what the controller answers; returns 1 if the run is not up, or has failed meanwhile."""
    controller = arguments.find_controller(args)
    if controller is None:
        return 1
    status = asyncio.run(_ask(controller))
    if not args.follow:
        _show(status)
        return 0
    end = asyncio.run(_follow(controller, status.total_steps, args.patience))
    print(end.message, file=sys.stdout if end.ok else sys.stderr)
    return 0 if end.ok else 1


async def _follow(controller: arguments.ControllerAddress, total_steps: int, patience_s: float) -> EndEvent:
    view = PlainView(total_steps)
    pulse = asyncio.create_task(_pulse(view), name="pulse")
    try:
        return await follow(controller.address, controller.credentials, view, patience_s=patience_s)
    finally:
        pulse.cancel()


async def _pulse(view: PlainView) -> None:
    while True:
        await asyncio.sleep(1.0)
        view.pulse()


async def _ask(controller: arguments.ControllerAddress) -> RunStatus:
    async with ControllerClient(controller.address, controller.credentials) as client:
        return await client.status()


def _show(status: RunStatus) -> None:
    console = Console(highlight=False, markup=False)
    now = status.now
    words = phase_words(now.phase, now.admitted, now.wanted)
    console.print(f"run       {status.run_id}\nfolder    {status.run_dir}")
    console.print(f"now       step {now.step}/{status.total_steps}: {words}, {status.seconds_in_phase:.1f} s")
    if status.policy:
        console.print(f"policy    {status.policy}")
    columns = ("member", "engine", "state", "policy", "in flight", "heard", "address")
    table = Table(*columns, box=None, pad_edge=False)
    for member in status.members:
        policy = f"v{member.policy.version}" if member.policy else ""
        heard = f"{member.seconds_since_heartbeat:.1f} s ago"
        doing = (member.state, policy, str(member.in_flight), heard)
        table.add_row(member.member_id, member.engine, *doing, member.address)
    console.print(table)
    if status.metrics:
        console.print(step_line(now.step, status.total_steps, status.metrics))
