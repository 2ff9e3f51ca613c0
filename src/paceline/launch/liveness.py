"""Liveness: asks the controller how its members are, and kills processes that run but do not answer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import NoReturn

from paceline.core.errors import PacelineError
from paceline.core.members import READY_STATES
from paceline.launch.planning.plan import Role
from paceline.launch.presence import Sighting
from paceline.launch.services import Services, Unit
from paceline.runs.controller_client import ControllerClient, MemberStatus
from paceline.service.identity.credentials import Credentials

log = logging.getLogger(__name__)

_INTERVAL_S = 2.0
_READY_WORDS = frozenset(state.value for state in READY_STATES)
# The controller's states of a member that is not part of the fleet any more.
_GONE_WORDS = frozenset({"dead", "left"})


class Liveness:
    """Kills hung processes of `services`, which then starts them again.

    Args:
        say: shows a message to the user.
        milestone: shows, as a part of the start-up, that a member is ready for the first time.
    """

    def __init__(
        self, services: Services, *, say: Callable[[str], None], milestone: Callable[[str], None]
    ) -> None:
        self._services, self._say, self._milestone = services, say, milestone

    async def run(self, address: str, credentials: Credentials) -> NoReturn:
        """Asks every two seconds, until cancelled."""
        async with ControllerClient(address, credentials) as controller:
            while True:
                await asyncio.sleep(_INTERVAL_S)
                try:
                    members = {member.member_id: member for member in (await controller.status()).members}
                except PacelineError as error:
                    log.info("no status: %s", error)
                    members = None
                self._judge(members, asyncio.get_running_loop().time())

    def _judge(self, members: dict[str, MemberStatus] | None, now: float) -> None:
        for unit in self._services.units:
            # Reward models are not members: another replica gets the responses that one does not score.
            if not unit.running or unit.role is Role.REWARD_MODEL:
                continue
            if unit.role is Role.CONTROLLER:
                reason = unit.presence.look(None if members is None else _ANSWERS, now)
            elif members is None:
                unit.presence.skip(now)
                continue
            else:
                was_ready = unit.presence.was_ready
                reason = unit.presence.look(_sighting(members.get(unit.member_id)), now)
                if unit.presence.was_ready and not was_ready:
                    self._milestone(f"{unit.name} is ready")
            if reason is not None:
                self._kill(unit, reason)

    def _kill(self, unit: Unit, reason: str) -> None:
        sentence = f"{unit.name} {reason}: killing it"
        log.warning("%s", sentence)
        self._say(sentence)
        unit.presence.start(asyncio.get_running_loop().time())
        unit.kill()


_ANSWERS = Sighting(heard_s_ago=0.0, alive=True, ready=True)


def _sighting(member: MemberStatus | None) -> Sighting | None:
    if member is None:
        return None
    return Sighting(
        heard_s_ago=member.seconds_since_heartbeat,
        alive=member.state not in _GONE_WORDS,
        ready=member.state in _READY_WORDS,
    )
