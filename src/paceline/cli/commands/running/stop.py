"""`paceline stop`: ends a run after the step in progress, with a checkpoint, or at once."""

from __future__ import annotations

import argparse
import asyncio
import sys

from paceline.cli.commands import arguments
from paceline.core.errors import DeadlineError, PeerLostError
from paceline.core.run_record.run_events import EndEvent, NoticeEvent
from paceline.runs.controller_client import ControllerClient

_REASON = "paceline stop"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of this command."""
    arguments.add_controller(parser)
    parser.add_argument(
        "--now", action="store_true", help="end the run at once; the steps since its last checkpoint are lost"
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=3600.0,
        metavar="SECONDS",
        help="seconds to wait for the end of the step; the run ends even if they pass (default: %(default)g)",
    )


def run(args: argparse.Namespace) -> int:
    """Stops a run and waits for its end; returns 1 if the run is not up, or fails meanwhile."""
    controller = arguments.find_controller(args)
    if controller is None:
        return 1
    end = asyncio.run(_stop(controller, now=args.now, timeout_s=args.timeout))
    is_fine = end.ok or args.now
    print(end.message, file=sys.stdout if is_fine else sys.stderr)
    return 0 if is_fine else 1


async def _stop(controller: arguments.ControllerAddress, *, now: bool, timeout_s: float) -> EndEvent:
    peer = f"the controller at {controller.address}"
    async with ControllerClient(controller.address, controller.credentials) as client:
        status = await client.status()
        await client.stop_run(_REASON, after_step=not now)
        if not now:
            print(f"the run ends after step {max(1, status.now.step)}, with a checkpoint", flush=True)
        try:
            async with asyncio.timeout(timeout_s):
                async for event in client.watch(from_step=status.total_steps + 1):
                    if isinstance(event, EndEvent):
                        return event
                    if isinstance(event, NoticeEvent):
                        print(event.message, flush=True)
        except TimeoutError:
            raise DeadlineError(
                phase="STOP",
                peer=peer,
                seconds=timeout_s,
                hint="`paceline status` shows what the run does; `paceline stop --now` ends it at once",
            ) from None
        raise PeerLostError(
            f"{peer} was lost before it said how the run ended; if `paceline status` reaches it again, "
            "repeat the command",
            peer=peer,
        )
