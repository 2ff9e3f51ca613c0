"""A member's client of the controller: registers, sends heartbeats, leaves.

register -> heartbeats, every heartbeat_s and at `poke()` -> (unknown: register again) -> run over, or leave
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from paceline.config.load import parse
from paceline.config.run import RunConfig
from paceline.core.errors import DeadlineError, PacelineError, PeerLostError, ProtocolError
from paceline.core.members import MemberKind, MemberState
from paceline.core.policy import PolicyTag
from paceline.rpc.v1 import controller_pb2, controller_pb2_grpc
from paceline.service import channels
from paceline.wire.members import member_kind_to_proto
from paceline.wire.protobuf import policy_tag_to_proto

log = logging.getLogger(__name__)

PEER = "controller"
_PARTING_S = 3.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Registration:
    """The controller's answer to a new member. `resume_from` is a checkpoint folder to load, or None."""

    run_id: str
    run_dir: Path
    config: RunConfig
    broker_url: str
    resume_from: Path | None
    heartbeat_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class MemberReport:
    """The content of a heartbeat."""

    state: MemberState
    policy: PolicyTag | None = None
    in_flight: int = 0


class ControllerLink:
    """The connection of one incarnation of a member to its controller."""

    def __init__(
        self,
        controller_address: str,
        *,
        kind: MemberKind,
        member_id: str,
        address: str,
        num_ranks: int = 1,
        token: str = "",
    ) -> None:
        self.member_id = member_id
        self.incarnation = secrets.token_hex(8)
        self._controller_address = controller_address
        self.address = address
        self._kind, self._num_ranks = kind, num_ranks
        self._channel = channels.connect(controller_address, token=token)
        self._stub = controller_pb2_grpc.ControllerServiceStub(self._channel)
        self._poked = asyncio.Event()
        self._registration: Registration | None = None

    async def register(self, timeout_s: float) -> Registration:
        """Registers, waiting up to `timeout_s` seconds for a controller that is not up yet.

        Raises:
            DeadlineError: no controller at the address.
            PacelineError: the controller refused; its own class and words.
        """
        request = controller_pb2.RegisterRequest(
            kind=member_kind_to_proto(self._kind),
            member_id=self.member_id,
            incarnation=self.incarnation,
            address=self.address,
            num_ranks=self._num_ranks,
        )
        deadline = time.monotonic() + timeout_s
        while True:
            left = deadline - time.monotonic()
            try:
                answer = await channels.call(
                    self._stub.Register,
                    request,
                    timeout_s=max(left, 0.001),
                    phase="REGISTER",
                    peer=PEER,
                    wait_for_ready=True,
                )
                break
            except PeerLostError:
                # The controller went away during its answer: a restart. The deadline bounds the repeats.
                await asyncio.sleep(0.2)
            except DeadlineError as error:
                raise DeadlineError(
                    phase="REGISTER",
                    peer=f"the controller at {self._controller_address}",
                    seconds=timeout_s,
                    hint="is it running, and is this its address?",
                ) from error
        self._registration = _read(answer)
        log.info("registered with run %s as %s", self._registration.run_id, self.member_id)
        return self._registration

    def poke(self) -> None:
        """Sends the next heartbeat at once, after a change of state. Call it from the event loop's thread."""
        self._poked.set()

    async def run(
        self,
        report: Callable[[], MemberReport],
        *,
        on_reregistered: Callable[[], None] | None = None,
    ) -> None:
        """Heartbeats until the controller says that the run is over.

        Args:
            report: makes the content of each heartbeat.
            on_reregistered: called when the controller had forgotten this member (it took it for dead, or has
                restarted): the member's weights may be stale.

        Raises:
            PeerLostError: the controller has been unreachable for service.dead_after_s.
            ProtocolError: the controller at the address now leads another run.
        """
        registration = self._require()
        dead_after_s = registration.config.service.dead_after_s
        silent_since: float | None = None
        while True:
            self._poked.clear()
            started = time.monotonic()
            try:
                answer = await self._heartbeat(report(), timeout_s=max(2.0, registration.heartbeat_s))
                silent_since = None
            except (PeerLostError, DeadlineError) as error:
                # Counted from the first failed call: time in which this process was busy is no silence.
                silent_since = started if silent_since is None else silent_since
                silent_s = time.monotonic() - silent_since
                log.warning("controller silent for %.1f s: %s", silent_s, error)
                if silent_s >= dead_after_s:
                    raise PeerLostError(
                        f"the controller at {self._controller_address} has not answered for {silent_s:.0f} s "
                        f"(service.dead_after_s={dead_after_s:g}); its log says why",
                        peer=PEER,
                    ) from error
                await asyncio.sleep(min(1.0, registration.heartbeat_s))
                continue
            if answer.run_over:
                log.info("the controller says that the run is over")
                return
            if not answer.known:
                registration = await self._register_again(registration, dead_after_s)
                if on_reregistered is not None:
                    on_reregistered()
                continue
            await self._pause(registration.heartbeat_s)

    async def fail(self, message: str) -> None:
        """Tells the controller why this process is about to end; best effort, within 3 s."""
        try:
            await self._heartbeat(None, timeout_s=_PARTING_S, failure=message)
        except PacelineError as error:
            log.warning("could not report the failure: %s", error)

    async def leave(self, reason: str) -> None:
        """Says goodbye; best effort, within 3 s."""
        request = controller_pb2.LeaveRequest(
            member_id=self.member_id, incarnation=self.incarnation, reason=reason
        )
        try:
            await channels.call(self._stub.Leave, request, timeout_s=_PARTING_S, phase="LEAVE", peer=PEER)
        except PacelineError as error:
            log.warning("could not say goodbye: %s", error)

    async def close(self) -> None:
        """Closes the connection."""
        await self._channel.close()

    def _require(self) -> Registration:
        if self._registration is None:
            raise ProtocolError("register() comes before run()")
        return self._registration

    async def _heartbeat(
        self, report: MemberReport | None, *, timeout_s: float, failure: str = ""
    ) -> controller_pb2.HeartbeatResponse:
        policy = report.policy if report else None
        request = controller_pb2.HeartbeatRequest(
            member_id=self.member_id,
            incarnation=self.incarnation,
            state=report.state.value if report else "",
            policy=policy_tag_to_proto(policy) if policy else None,
            in_flight=report.in_flight if report else 0,
            failure=failure,
        )
        return await channels.call(
            self._stub.Heartbeat, request, timeout_s=timeout_s, phase="HEARTBEAT", peer=PEER
        )

    async def _register_again(self, before: Registration, timeout_s: float) -> Registration:
        log.warning("the controller does not know %s (any more): registering again", self.member_id)
        after = await self.register(timeout_s)
        if after.run_id != before.run_id:
            raise ProtocolError(
                f"the controller at {self._controller_address} leads run {after.run_id}, "
                f"this member belongs to {before.run_id}; start a new member for the new run"
            )
        return after

    async def _pause(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._poked.wait()
        except TimeoutError:
            return


def _read(answer: controller_pb2.RegisterResponse) -> Registration:
    try:
        tree = json.loads(answer.config_json)
    except ValueError as error:
        raise ProtocolError(f"the controller sent a configuration that is not JSON: {error}") from error
    return Registration(
        run_id=answer.run_id,
        run_dir=Path(answer.run_dir),
        config=parse(RunConfig, tree, origin="the controller's configuration"),
        broker_url=answer.broker_url,
        resume_from=Path(answer.resume_from) if answer.resume_from else None,
        heartbeat_s=answer.heartbeat_s or 1.0,
    )
