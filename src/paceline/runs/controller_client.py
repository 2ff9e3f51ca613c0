"""Asks a controller for the run's status and events, and tells it to stop, for the command line."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass

from paceline.core.policy import PolicyTag
from paceline.core.run_record.run_events import PhaseEvent, RunEvent
from paceline.rpc.v1 import controller_pb2, controller_pb2_grpc
from paceline.runs.run_dir import RunNote
from paceline.service.grpc import channels
from paceline.service.identity.credentials import Credentials
from paceline.wire.calls.protobuf import policy_tag_from_proto
from paceline.wire.calls.run_events import run_event_from_proto
from paceline.wire.records import from_proto


@dataclass(frozen=True, kw_only=True, slots=True)
class MemberStatus:
    """A member of the fleet.

    `policy` is None before its first version; only rollout servers have an `engine`.
    """

    member_id: str
    state: str
    policy: PolicyTag | None
    in_flight: int
    seconds_since_heartbeat: float
    address: str
    engine: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStatus:
    """The state of a run; `metrics` are those of the last finished step."""

    run_id: str
    run_dir: str
    total_steps: int
    now: PhaseEvent
    seconds_in_phase: float
    policy: PolicyTag | None
    members: tuple[MemberStatus, ...]
    metrics: Mapping[str, float]


class ControllerClient:
    """A connection to a controller; use it as an async context manager.

    Methods raise PeerLostError if the controller cannot be reached, ConfigError if it refuses the token.
    """

    def __init__(self, address: str, credentials: Credentials) -> None:
        self._channel = channels.connect(address, credentials=credentials, role="controller")
        self._stub = controller_pb2_grpc.ControllerServiceStub(self._channel)
        self._peer = f"the controller at {address}"

    @classmethod
    def of_run(cls, note: RunNote) -> ControllerClient:
        """Returns a client of the controller of a run on this machine, past all proxies."""
        credentials = Credentials.from_env().for_own_machine().with_token(note.token)
        return cls(note.controller, credentials)

    async def __aenter__(self) -> ControllerClient:
        """Connects at the first call."""
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()

    async def status(self) -> RunStatus:
        """Asks for the state of the run."""
        request = controller_pb2.GetStatusRequest()
        reply = await channels.call(
            self._stub.GetStatus, request, timeout_s=5.0, phase="STATUS", peer=self._peer
        )
        return from_proto(
            reply,
            RunStatus,
            now=PhaseEvent(
                step=reply.step,
                phase=reply.phase,
                admitted=reply.trajectories_admitted,
                wanted=reply.trajectories_wanted,
            ),
            policy=_policy_of(reply),
            members=tuple(
                from_proto(member, MemberStatus, policy=_policy_of(member)) for member in reply.members
            ),
        )

    async def watch(self, *, from_step: int) -> AsyncIterator[RunEvent]:
        """Yields events from `from_step` on; ends early if this client reads too slowly."""
        request = controller_pb2.WatchRequest(from_step=from_step)
        async for message in channels.stream(self._stub.Watch, request, phase="WATCH", peer=self._peer):
            event = run_event_from_proto(message)
            if event is not None:
                yield event

    async def stop_run(self, reason: str, *, after_step: bool = False) -> None:
        """Ends the run with this reason, at once or after the step in progress, with a checkpoint."""
        request = controller_pb2.StopRunRequest(reason=reason, after_step=after_step)
        await channels.call(self._stub.StopRun, request, timeout_s=2.0, phase="STOP", peer=self._peer)

    async def report_end(
        self, member_id: str, incarnations: Sequence[str], reason: str, *, timeout_s: float
    ) -> None:
        """Reports that these incarnations of a member have ended; waits if the controller is unreachable."""
        request = controller_pb2.ReportEndRequest(
            member_id=member_id, incarnations=incarnations, reason=reason
        )
        await channels.call(
            self._stub.ReportEnd,
            request,
            timeout_s=timeout_s,
            phase="END",
            peer=self._peer,
            wait_for_ready=True,
        )

    async def set_rates(self, lr_scale: float) -> int:
        """Scales the configured learning rates; returns the first step trained with them."""
        request = controller_pb2.SetRatesRequest(lr_scale=lr_scale)
        reply = await channels.call(
            self._stub.SetRates, request, timeout_s=5.0, phase="RATES", peer=self._peer
        )
        return reply.from_step

    async def drain(self, member_id: str) -> None:
        """Makes a member finish its work and leave; raises ConfigError if the run needs it."""
        request = controller_pb2.DrainRequest(member_id=member_id)
        await channels.call(self._stub.Drain, request, timeout_s=5.0, phase="DRAIN", peer=self._peer)


def _policy_of(message: controller_pb2.GetStatusResponse | controller_pb2.MemberStatus) -> PolicyTag | None:
    return policy_tag_from_proto(message.policy) if message.HasField("policy") else None
