"""A member's client of the controller: registers, sends heartbeats, leaves.

register -> heartbeats, every heartbeat_s and at `poke()` -> (unknown: register again) -> run over, or leave

If the controller does not answer, the member works on for up to service.recovery_timeout_s. A controller
that has restarted, or has declared the member dead, does not know the member, which then registers again with
its policy; the answer says whether that policy is still the committed one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from paceline.config.load import parse
from paceline.config.run import RunConfig
from paceline.core.errors import DeadlineError, PacelineError, PeerLostError, ProtocolError
from paceline.core.members import MemberKind, MemberState, RolloutState
from paceline.core.policy import PolicyTag
from paceline.rpc.v1 import controller_pb2, controller_pb2_grpc
from paceline.service.grpc import channels
from paceline.service.grpc.fencing import TermFence
from paceline.service.identity.credentials import Credentials
from paceline.service.observability import metrics, telemetry
from paceline.service.observability.usage import UsageSampler
from paceline.service.process import STARTED_AS
from paceline.service.tasks import wait_at_most
from paceline.wire.calls.members import member_kind_to_proto, usage_to_proto
from paceline.wire.calls.protobuf import policy_tag_from_proto, policy_tag_to_proto
from paceline.wire.records import from_proto

log = logging.getLogger(__name__)

PEER = "controller"
_PARTING_S = 3.0
# A registration without an answer is repeated after this time; the first repeat is logged.
_TELL_AFTER_S = 10.0
# A longer time between two failed heartbeats does not count as the controller's absence.
_LONGEST_ATTEMPT_S = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Registration:
    """The controller's answer to a registration.

    Attributes:
        blob_stores: addresses of the broker's blob stores.
        term: counts the starts of the run's controller.
        policy: the committed policy; None before the first commit.
        checkpoints: paths or URLs that a learner may load, newest first.
        checkpoint_root: the folder of the run's checkpoints; "" if the controller writes none.
        checkpoint_marker: the text of the marker file in that folder.
    """

    run_id: str
    run_dir: Path
    config: RunConfig
    broker_url: str
    heartbeat_s: float
    term: int
    policy: PolicyTag | None
    checkpoints: tuple[str, ...]
    checkpoint_root: str = ""
    checkpoint_marker: str = ""
    hold: bool = False
    blob_stores: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class MemberReport:
    """The content of a heartbeat."""

    state: MemberState
    policy: PolicyTag | None = None
    in_flight: int = 0


class ControllerLink:
    """The connection of one incarnation of a member to its controller.

    Attributes:
        may_start: set once the controller lets this member allocate its initial GPU memory.
    """

    def __init__(
        self,
        controller_address: str,
        *,
        kind: MemberKind,
        member_id: str,
        address: str,
        num_ranks: int = 1,
        validates: bool = False,
        engine: str = "",
        credentials: Credentials | None = None,
        fence: TermFence | None = None,
    ) -> None:
        self.member_id = member_id
        self.incarnation = os.environ.get(STARTED_AS) or secrets.token_hex(8)
        self._controller_address = controller_address
        self.address = address
        self._kind, self._num_ranks, self._fence = kind, num_ranks, fence or TermFence()
        self._validates, self._engine = validates, engine
        self._channel = channels.connect(controller_address, credentials=credentials, role="controller")
        self._stub = controller_pb2_grpc.ControllerServiceStub(self._channel)
        self._usage = UsageSampler(uses_gpus=kind is not MemberKind.REWARD)
        self._poked = asyncio.Event()
        self._notices: list[str] = []
        self.may_start = asyncio.Event()
        self._registration: Registration | None = None
        self._may_leave: Callable[[], None] | None = None

    async def register(self, timeout_s: float, report: MemberReport) -> Registration:
        """Registers; waits up to `timeout_s` seconds for the controller to come up.

        Args:
            report: the member's current state.

        Raises:
            DeadlineError: no controller answers at the address.
            ProtocolError: a controller of a later term is known.
            PacelineError: the controller refused; class and message are the controller's.
        """
        request = controller_pb2.RegisterRequest(
            kind=member_kind_to_proto(self._kind),
            member_id=self.member_id,
            incarnation=self.incarnation,
            address=self.address,
            num_ranks=self._num_ranks,
            validates=self._validates,
            engine=self._engine,
            state=report.state.value,
            policy=policy_tag_to_proto(report.policy) if report.policy else None,
        )
        answer = _read(await self._ask_to_register(request, timeout_s))
        self._fence.note(answer.term)
        self._registration = answer
        if not answer.hold:
            self.may_start.set()
        log.info("registered with run %s as %s, term %d", answer.run_id, self.member_id, answer.term)
        return answer

    async def _ask_to_register(
        self, request: controller_pb2.RegisterRequest, timeout_s: float
    ) -> controller_pb2.RegisterResponse:
        deadline, told = time.monotonic() + timeout_s, False
        while (left := deadline - time.monotonic()) > 0:
            try:
                return await channels.call(
                    self._stub.Register,
                    request,
                    timeout_s=min(left, _TELL_AFTER_S),
                    phase="REGISTER",
                    peer=PEER,
                    wait_for_ready=True,
                )
            except PeerLostError:
                # The controller restarted during its answer. The deadline bounds the repeats.
                await asyncio.sleep(0.2)
            except DeadlineError:
                if not told:
                    told = True
                    log.warning("no controller answers at %s yet", self._controller_address)
        raise DeadlineError(
            phase="REGISTER",
            peer=f"the controller at {self._controller_address}",
            seconds=timeout_s,
            hint="is it running, and is this its address?",
        )

    def poke(self) -> None:
        """Sends the next heartbeat at once, after a change of state. Call it from the event loop's thread."""
        self._poked.set()

    def notify(self, message: str) -> None:
        """Sends a message to everyone who watches the run. Call it from the event loop's thread."""
        self._notices.append(message)
        self._poked.set()

    def ask_to_leave(self, may_leave: Callable[[], None]) -> None:
        """Asks with every heartbeat whether the run can spare this member, whose process must end.

        Args:
            may_leave: called, maybe repeatedly, when the run can spare the member, or when no controller
                answers.
        """
        self._may_leave = may_leave
        self._poked.set()

    async def run(
        self,
        report: Callable[[], MemberReport],
        *,
        on_reregistered: Callable[[], None] | None = None,
        on_drain: Callable[[], None] | None = None,
    ) -> None:
        """Heartbeats until the controller says that the run is over.

        Args:
            report: returns the content of each heartbeat.
            on_reregistered: called after a new registration if the member's weights are stale, which means
                that it does not sample from exactly the committed policy.
            on_drain: called, maybe repeatedly, when the controller drains the member.

        Raises:
            PeerLostError: the controller has been unreachable for service.recovery_timeout_s.
            ProtocolError: the controller at the address now leads another run.
        """
        heartbeat_s = self._require().heartbeat_s
        telemetry.count(metrics.HEARTBEATS, 0, result="failed")
        absence = _Absence(self._controller_address, self._require().config.service.recovery_timeout_s)
        while True:
            self._poked.clear()
            # An answer to a heartbeat sent before the signal does not count as permission.
            num_notices, may_leave = len(self._notices), self._may_leave or _nothing
            try:
                answer = await self._heartbeat(report(), timeout_s=max(2.0, heartbeat_s))
            except (PeerLostError, DeadlineError) as error:
                telemetry.count(metrics.HEARTBEATS, result="failed")
                absence.goes_on(error)
                if absence.seconds >= self._require().config.service.suspect_after_s:
                    may_leave()
                await asyncio.sleep(min(1.0, heartbeat_s))
                continue
            telemetry.count(metrics.HEARTBEATS, result="answered")
            absence.ends()
            if answer.known:
                del self._notices[:num_notices]
            if answer.run_over:
                log.info("the controller says that the run is over")
                return
            if answer.drain and on_drain is not None:
                on_drain()
            if answer.known:
                self._note(answer, may_leave)
                await wait_at_most(self._poked, heartbeat_s)
            elif not await self._register_again(report()) and on_reregistered is not None:
                on_reregistered()

    def _note(self, answer: controller_pb2.HeartbeatResponse, may_leave: Callable[[], None]) -> None:
        if not answer.hold:
            self.may_start.set()
        if not answer.stay:
            may_leave()

    async def linger(self, report: Callable[[], MemberReport]) -> None:
        """Sends heartbeats after `run`, so that a slowly ending member is not declared dead.

        Runs until it is cancelled, or the controller does not answer.
        """
        heartbeat_s = self._require().heartbeat_s
        with contextlib.suppress(PeerLostError, DeadlineError):
            while True:
                await asyncio.sleep(heartbeat_s)
                await self._heartbeat(report(), timeout_s=max(2.0, heartbeat_s))

    async def fail(self, message: str, *, is_final: bool) -> None:
        """Tells the controller why this process will end; best effort, within 3 s.

        `is_final`: a restarted process would fail in the same way.
        """
        try:
            await self._heartbeat(None, timeout_s=_PARTING_S, failure=message, is_final=is_final)
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
        """Closes the connection to the controller."""
        await self._channel.close()

    def _require(self) -> Registration:
        if self._registration is None:
            raise ProtocolError("register() comes before run()")
        return self._registration

    async def _heartbeat(
        self, report: MemberReport | None, *, timeout_s: float, failure: str = "", is_final: bool = False
    ) -> controller_pb2.HeartbeatResponse:
        policy = report.policy if report else None
        request = controller_pb2.HeartbeatRequest(
            member_id=self.member_id,
            incarnation=self.incarnation,
            state=report.state.value if report else "",
            policy=policy_tag_to_proto(policy) if policy else None,
            in_flight=report.in_flight if report else 0,
            failure=failure,
            is_final=is_final,
            notice="; ".join(self._notices),
            stopping=self._may_leave is not None,
            usage=usage_to_proto(self._usage.sample()) if report else None,
        )
        return await channels.call(
            self._stub.Heartbeat, request, timeout_s=timeout_s, phase="HEARTBEAT", peer=PEER
        )

    async def _register_again(self, report: MemberReport) -> bool:
        """Registers again; returns whether the member samples from exactly the committed policy."""
        log.warning("the controller does not know %s (any more): registering again", self.member_id)
        before = self._require()
        after = await self.register(before.config.service.recovery_timeout_s, report)
        if after.run_id != before.run_id:
            raise ProtocolError(
                f"the controller at {self._controller_address} leads run {after.run_id}, "
                f"this member belongs to {before.run_id}; start a new member for the new run"
            )
        is_serving = report.state is RolloutState.SERVING and report.policy is not None
        return is_serving and report.policy == after.policy


def _nothing() -> None:
    """Stands for `may_leave` while the process has not been told to end."""


def _read(answer: controller_pb2.RegisterResponse) -> Registration:
    try:
        tree = json.loads(answer.config_json)
    except ValueError as error:
        raise ProtocolError(f"the controller sent a configuration that is not JSON: {error}") from error
    return from_proto(
        answer,
        Registration,
        run_dir=Path(answer.run_dir),
        config=parse(RunConfig, tree, origin="the controller's configuration"),
        heartbeat_s=answer.heartbeat_s or 1.0,
        policy=policy_tag_from_proto(answer.policy) if answer.HasField("policy") else None,
    )


class _Absence:
    """Tracks a controller that does not answer: logs when that begins and ends, and bounds the wait."""

    def __init__(self, address: str, longest_s: float) -> None:
        self._address, self._longest_s = address, longest_s
        self.seconds = self._since = 0.0
        self._is_away = False

    def goes_on(self, error: PacelineError) -> None:
        """Notes a call that failed.

        Raises:
            PeerLostError: the controller has been away too long.
        """
        now = time.monotonic()
        if not self._is_away:
            self._is_away, self.seconds = True, 0.0
            log.warning(
                "the controller at %s is away (%s); going on without it for up to %g s",
                self._address,
                error,
                self._longest_s,
            )
        else:
            # A longer gap between two attempts was a pause of this process or of the machine.
            self.seconds += min(now - self._since, _LONGEST_ATTEMPT_S)
        self._since = now
        if self.seconds >= self._longest_s:
            raise PeerLostError(
                f"the controller at {self._address} has not answered for {self.seconds:.0f} s "
                f"(service.recovery_timeout_s={self._longest_s:g}); its log says why",
                peer=PEER,
            ) from error

    def ends(self) -> None:
        """Notes a call that was answered."""
        if self._is_away:
            self._is_away = False
            log.warning("the controller is back after %.1f s", self.seconds)
