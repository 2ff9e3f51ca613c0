"""ControllerService: members register, report and leave; people see the status, follow the run, stop it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from paceline.controller.fleet.clients import is_serving
from paceline.controller.fleet.membership import Health, Member
from paceline.controller.fleet.supervisor import Supervisor
from paceline.controller.fleet.turns import Turns
from paceline.controller.phases import Phase
from paceline.controller.progress import Progress, Run
from paceline.core.errors import ConfigError, InvalidMessageError
from paceline.core.members import MemberKind
from paceline.core.policy import PolicyTag
from paceline.core.text import one_line
from paceline.rpc.v1 import controller_pb2 as pb
from paceline.rpc.v1 import controller_pb2_grpc
from paceline.service.grpc.errors import clip
from paceline.service.identity.credentials import Credentials
from paceline.storage.folder import Folder
from paceline.wire.calls.members import (
    member_kind_from_proto,
    member_kind_to_proto,
    member_state_from_word,
    usage_from_proto,
)
from paceline.wire.calls.protobuf import policy_tag_from_proto, policy_tag_to_proto
from paceline.wire.calls.run_events import run_event_to_proto

_MAX_NAME_CHARS = 200
_MAX_LR_SCALE = 100.0
# A server that leaves during a push makes the push fail, so it is told to leave only afterwards.
_PUSHING = (Phase.FORMING, Phase.PUBLISH, Phase.COMMIT)


class ControllerServicer(controller_pb2_grpc.ControllerServiceServicer):
    """Answers the calls of members and people.

    Args:
        credentials: used to ask members whether they still serve.
        checkpoints: called in a thread; returns the folders that a learner may load at first, newest first.
        checkpoint_marker: text of a file in the folder of the checkpoints, by which a learner recognizes that
            it sees the same folder.
        stop: called with the reason when a client asks to end the run at once.
    """

    def __init__(
        self,
        run: Run,
        progress: Progress,
        supervisor: Supervisor,
        *,
        turns: Turns,
        broker_url: str,
        blob_stores: Sequence[str] = (),
        credentials: Credentials,
        checkpoints: Callable[[], Sequence[Folder]],
        checkpoint_marker: str,
        stop: Callable[[str], None],
    ) -> None:
        self._run, self._progress, self._supervisor = run, progress, supervisor
        self._turns = turns
        self._broker_url, self._blob_stores, self._stop = broker_url, blob_stores, stop
        self._checkpoints, self._checkpoint_marker = checkpoints, checkpoint_marker
        self._credentials = credentials
        self._config_json = run.config.model_dump_json()
        self._over = asyncio.Event()

    def end(self) -> None:
        """Makes the answers to heartbeats tell members to leave."""
        self._over.set()

    async def Register(self, request: pb.RegisterRequest, context: Any) -> pb.RegisterResponse:
        """Adds a member to the fleet and returns all that it needs to know of the run."""
        kind = member_kind_from_proto(request.kind)
        if not request.member_id or not request.incarnation:
            raise InvalidMessageError(
                f"a member must name its id and incarnation; got id {request.member_id!r}, "
                f"incarnation {request.incarnation!r}",
                reason="incomplete_registration",
            )
        _check_names(request)
        if request.validates and not self._run.config.validates_beside:
            raise ConfigError(
                f"{request.member_id} was started with --validates, and this run has no "
                "rollout.validation_servers: start it without, or set the key"
            )
        engines = self._run.config.rollout.engine_names
        if request.engine and request.engine not in engines:
            raise ConfigError(
                f"{request.member_id} was started with --engine {request.engine}, and this run has "
                f"{', '.join(engines)}: name it in rollout.other_engines, or start it with one of these"
            )
        await self._refuse_second_holder(request)
        await self._supervisor.apply(
            self._supervisor.fleet.register(
                kind=kind,
                member_id=request.member_id,
                incarnation=request.incarnation,
                address=request.address,
                num_ranks=request.num_ranks,
                state=member_state_from_word(kind, request.state) if request.state else None,
                policy=_policy_of(request),
                validates=request.validates,
                engine=(request.engine or engines[0]) if kind is MemberKind.ROLLOUT else "",
            )
        )
        policy, member = self._progress.policy, self._supervisor.fleet.get(request.member_id)
        is_learner = kind is MemberKind.LEARNER
        folders = await asyncio.to_thread(self._checkpoints) if is_learner else ()
        return pb.RegisterResponse(
            run_id=self._run.id,
            run_dir=str(self._run.dir),
            config_json=self._config_json,
            broker_url=self._broker_url,
            blob_stores=self._blob_stores,
            heartbeat_s=self._run.config.service.heartbeat_s,
            term=self._run.journal.term,
            policy=policy_tag_to_proto(policy) if policy else None,
            checkpoints=[str(folder) for folder in folders],
            checkpoint_root=str(self._run.checkpoints) if is_learner else "",
            checkpoint_marker=self._checkpoint_marker if is_learner else "",
            hold=member is not None and not self._turns.may_start(member),
        )

    async def _refuse_second_holder(self, request: pb.RegisterRequest) -> None:
        """Refuses a second process with the id of a working member.

        If the member was restarted, its old address no longer answers, or is the same as the new one.

        Raises:
            ConfigError: a member with this id was heard from recently, and answers at its address.
        """
        holder = self._supervisor.fleet.get(request.member_id)
        if (
            holder is not None
            and holder.health is Health.ALIVE
            and holder.incarnation != request.incarnation
            and holder.address != request.address
            and await is_serving(
                holder.address,
                holder.incarnation,
                role=holder.kind.value,
                credentials=self._credentials,
            )
        ):
            message = (
                f"a member {request.member_id} at {holder.address} exists already, so the one at "
                f"{request.address} is refused: give it another --member-id, or stop the first one"
            )
            self._run.events.notice(message)
            raise ConfigError(message)

    async def Heartbeat(self, request: pb.HeartbeatRequest, context: Any) -> pb.HeartbeatResponse:
        """Notes that a member is alive, and tells it what to do."""
        member = self._supervisor.fleet.get(request.member_id)
        if member is None:
            return pb.HeartbeatResponse(known=False, run_over=self._over.is_set())
        if request.notice:
            self._run.events.notice(f"{request.member_id}: {one_line(request.notice)}")
        # A member that reports why it ends may no longer have a state.
        only_failure = request.failure and not request.state
        state = None if only_failure else member_state_from_word(member.kind, request.state)
        known, changes = self._supervisor.fleet.heartbeat(
            request.member_id,
            request.incarnation,
            state=state,
            policy=_policy_of(request),
            in_flight=request.in_flight,
            failure=clip(request.failure),
            is_final=request.is_final,
        )
        await self._supervisor.apply(changes)
        if known and request.HasField("usage"):
            self._supervisor.usage.note(member, usage_from_proto(request.usage))
        return pb.HeartbeatResponse(
            known=known,
            run_over=self._over.is_set(),
            drain=known and member.is_draining and self._progress.phase not in _PUSHING,
            hold=known and not self._turns.may_start(member),
            stay=known and request.stopping and self._stays(member),
        )

    def _stays(self, member: Member) -> bool:
        """Returns whether a member that was told to end must stay, because the step or a push needs it."""
        is_held = self._supervisor.departures.holds(member)
        return is_held or (not member.is_starting and self._progress.phase in _PUSHING)

    async def Drain(self, request: pb.DrainRequest, context: Any) -> pb.DrainResponse:
        """Tells a member with its next heartbeat to finish its work and leave."""
        self._supervisor.drain(request.member_id)
        return pb.DrainResponse()

    async def Leave(self, request: pb.LeaveRequest, context: Any) -> pb.LeaveResponse:
        """Notes that a member leaves."""
        await self._supervisor.apply(
            self._supervisor.fleet.leave(request.member_id, request.incarnation, clip(request.reason))
        )
        return pb.LeaveResponse()

    async def ReportEnd(self, request: pb.ReportEndRequest, context: Any) -> pb.ReportEndResponse:
        """Notes that a member's processes have ended, as reported by the program that started them."""
        await self._supervisor.apply(
            self._supervisor.fleet.ended(request.member_id, request.incarnations, clip(request.reason))
        )
        return pb.ReportEndResponse()

    async def GetStatus(self, request: pb.GetStatusRequest, context: Any) -> pb.GetStatusResponse:
        """Returns what the run is doing now."""
        progress, now = self._progress, time.monotonic()
        members = [
            pb.MemberStatus(
                member_id=member.member_id,
                kind=member_kind_to_proto(member.kind),
                state=_status_word(member),
                address=member.address,
                policy=policy_tag_to_proto(member.policy) if member.policy else None,
                seconds_since_heartbeat=now - member.last_heard,
                in_flight=member.in_flight,
                engine=member.engine,
            )
            for member in self._supervisor.fleet.members()
        ]
        return pb.GetStatusResponse(
            run_id=self._run.id,
            run_dir=str(self._run.dir),
            step=progress.step,
            total_steps=self._run.config.trainer.num_steps,
            phase=progress.phase.value,
            seconds_in_phase=now - progress.phase_began,
            policy=policy_tag_to_proto(progress.policy) if progress.policy else None,
            members=members,
            metrics=progress.metrics,
            trajectories_admitted=progress.admitted,
            trajectories_wanted=progress.wanted,
        )

    async def Watch(self, request: pb.WatchRequest, context: Any) -> AsyncIterator[pb.WatchEvent]:
        """Yields events until the run ends."""
        async for event in self._run.events.follow(request.from_step):
            yield run_event_to_proto(event)

    async def StopRun(self, request: pb.StopRunRequest, context: Any) -> pb.StopRunResponse:
        """Requests an orderly end of the run, at once or after the step in progress."""
        reason = clip(request.reason) or "asked to stop"
        if request.after_step:
            self._progress.stop_reason = reason
        else:
            self._stop(reason)
        return pb.StopRunResponse()

    async def SetRates(self, request: pb.SetRatesRequest, context: Any) -> pb.SetRatesResponse:
        """Scales the learning rates of the steps that begin from now on."""
        if not 0 <= request.lr_scale <= _MAX_LR_SCALE:
            raise ConfigError(
                f"lr_scale={request.lr_scale:g} must be from 0 to {_MAX_LR_SCALE:g}: it multiplies every "
                "configured learning rate"
            )
        self._progress.lr_scale = request.lr_scale
        return pb.SetRatesResponse(from_step=self._progress.step + 1)


def _check_names(request: pb.RegisterRequest) -> None:
    """Refuses names that journal, status and log cannot show."""
    for field in ("member_id", "incarnation", "address"):
        name = getattr(request, field)
        if len(name) > _MAX_NAME_CHARS or not name.isprintable():
            raise InvalidMessageError(
                f"a member's {field} must be at most {_MAX_NAME_CHARS} printable characters; got {len(name)} "
                f"that begin with {name[:40]!r}",
                reason="unusable_name",
            )


def _policy_of(request: pb.RegisterRequest | pb.HeartbeatRequest) -> PolicyTag | None:
    """Returns the policy that a member holds; a learner's has no digest until it is published."""
    return policy_tag_from_proto(request.policy) if request.HasField("policy") else None


def _status_word(member: Member) -> str:
    if not member.usable:
        return member.health.value
    return member.state.value if member.state else "registered"
