"""`paceline rollout drain NAME`: a server finishes its prompt groups and leaves the run."""

from __future__ import annotations

import argparse
import asyncio

from paceline.cli.commands import arguments
from paceline.core.errors import DeadlineError
from paceline.runs.controller_client import ControllerClient, MemberStatus

_POLL_S = 0.5
_GONE = ("left", "dead")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of this command."""
    parser.add_argument("order", choices=["drain"], help="drain: finish the prompt groups, then leave")
    parser.add_argument("member_id", metavar="NAME", help="the server as `paceline status` names it")
    arguments.add_controller(parser)
    parser.add_argument(
        "--timeout",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="seconds to wait for the server to leave; it is drained even if they pass (default: "
        "%(default)g)",
    )


def run(args: argparse.Namespace) -> int:
    """Drains a server and waits until it has left; returns 1 if the run is not up."""
    controller = arguments.find_controller(args)
    if controller is None:
        return 1
    asyncio.run(_drain(controller, args.member_id, args.timeout))
    return 0


async def _drain(controller: arguments.ControllerAddress, member_id: str, timeout_s: float) -> None:
    async with ControllerClient(controller.address, controller.credentials) as client:
        before = await _find(client, member_id)
        await client.drain(member_id)
        print(
            f"{member_id} takes no more prompts; {before.in_flight if before else 0} samples are in progress"
        )
        try:
            async with asyncio.timeout(timeout_s):
                # Polling is good enough for a person who waits; the controller has no call that waits for a
                # member.
                while (member := await _find(client, member_id)) and member.state not in _GONE:  # noqa: ASYNC110
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            raise DeadlineError(
                phase="DRAIN",
                peer=member_id,
                seconds=timeout_s,
                hint="`paceline status` shows what the server is doing",
            ) from None
        print(f"{member_id} has left")


async def _find(client: ControllerClient, member_id: str) -> MemberStatus | None:
    members = (await client.status()).members
    return next((member for member in members if member.member_id == member_id), None)
