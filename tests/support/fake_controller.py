"""A controller of a few lines, as a servicer for in-process tests and as a program for the launcher's.

As a program it takes the real controller's arguments; FAKE_SCRIPT names what it does:
`steps` (default) ends well after two steps, `wait` runs on after them until StopRun, `fail` ends with an
error, `train` is in the first step of several until it is told to stop after it, `collect` waits in the first
step and has one answer, `idle` none.
FAKE_MEMBERS names a file of lines "MEMBER STATE", which GetStatus reports; FILE.told holds what it read last.
FAKE_CALLS names a file that gets a line for each StopRun and ReportEnd.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from paceline.core.policy import PolicyTag
from paceline.rpc.v1 import controller_pb2 as pb
from paceline.rpc.v1 import controller_pb2_grpc
from paceline.service.grpc.server import RunningServer, start_server
from paceline.service.identity.credentials import Credentials
from paceline.service.member.runtime import ServiceContext, run_service
from paceline.service.process import write_atomically
from paceline.wire.calls.protobuf import policy_tag_to_proto


class FakeController(controller_pb2_grpc.ControllerServiceServicer):
    """Records every call; answers as told."""

    def __init__(self, config_json: str = "{}", run_id: str = "run-1") -> None:
        self.config_json, self.run_id = config_json, run_id
        self.broker_url, self.run_dir = "redis://127.0.0.1:1/0", "/nowhere"
        self.calls: list[str] = []
        self.heartbeats: list[pb.HeartbeatRequest] = []
        self.registrations: list[pb.RegisterRequest] = []
        self.known = True
        self.run_over = self.drain = self.hold = self.stay = False
        self.term = 1
        self.run_dir = "/nowhere"
        self.members: list[pb.MemberStatus] = []
        self.lr_scales: list[float] = []
        self.policy: PolicyTag | None = None
        self.checkpoints: list[str] = []
        self.heard, self.may_answer = asyncio.Event(), asyncio.Event()
        self.may_answer.set()
        self.stopped: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.script: list[pb.WatchEvent] = []
        self.end_after_stop = True
        self.deaf = self.stops_well = False
        self.members_file: Path | None = None
        self.calls_file: Path | None = None
        self._dead_since: dict[str, float] = {}

    async def reported(self, state: str) -> pb.HeartbeatRequest:
        """The first heartbeat that says `state`; waits for it."""
        async with asyncio.timeout(300):
            while not any(beat.state == state for beat in self.heartbeats):
                self.heard.clear()
                await self.heard.wait()
        return next(beat for beat in self.heartbeats if beat.state == state)

    async def Register(self, request: pb.RegisterRequest, context: Any) -> pb.RegisterResponse:
        self.calls.append("register")
        self.registrations.append(request)
        self.known = True
        return pb.RegisterResponse(
            run_id=self.run_id,
            run_dir=self.run_dir,
            config_json=self.config_json,
            broker_url=self.broker_url,
            heartbeat_s=0.05,
            term=self.term,
            policy=policy_tag_to_proto(self.policy) if self.policy else None,
            checkpoints=self.checkpoints,
            hold=self.hold,
        )

    async def Heartbeat(self, request: pb.HeartbeatRequest, context: Any) -> pb.HeartbeatResponse:
        self.calls.append("heartbeat")
        self.heartbeats.append(request)
        self.heard.set()
        answer = pb.HeartbeatResponse(
            known=self.known,
            run_over=self.run_over,
            drain=self.drain,
            hold=self.hold,
            stay=self.stay and request.stopping,
        )
        await self.may_answer.wait()
        return answer

    async def Drain(self, request: pb.DrainRequest, context: Any) -> pb.DrainResponse:
        self.calls.append(f"drain {request.member_id}")
        self.drain = True
        return pb.DrainResponse()

    async def Leave(self, request: pb.LeaveRequest, context: Any) -> pb.LeaveResponse:
        self.calls.append(f"leave {request.reason}")
        return pb.LeaveResponse()

    async def ReportEnd(self, request: pb.ReportEndRequest, context: Any) -> pb.ReportEndResponse:
        self.calls.append(f"end {request.member_id} {' '.join(request.incarnations)}: {request.reason}")
        self._write_calls()
        return pb.ReportEndResponse()

    def _write_calls(self) -> None:
        if self.calls_file is not None:
            self.calls_file.write_text("".join(f"{call}\n" for call in self.calls))

    async def GetStatus(self, request: pb.GetStatusRequest, context: Any) -> pb.GetStatusResponse:
        told = self.members_file.read_text() if self.members_file is not None else ""
        if self.members_file is not None:
            self.members_file.with_suffix(".told").write_text(told)
        members = [
            pb.MemberStatus(
                member_id=name, state=state, seconds_since_heartbeat=self._silence_of(name, state)
            )
            for name, state in map(str.split, told.splitlines())
        ]
        return pb.GetStatusResponse(
            run_id=self.run_id, step=3, total_steps=9, phase="collect", members=[*members, *self.members]
        )

    def _silence_of(self, name: str, state: str) -> float:
        """Seconds since a member was first said to be dead; 0 for others."""
        if state != "dead":
            self._dead_since.pop(name, None)
            return 0.0
        return time.monotonic() - self._dead_since.setdefault(name, time.monotonic())

    async def SetRates(self, request: pb.SetRatesRequest, context: Any) -> pb.SetRatesResponse:
        self.lr_scales.append(request.lr_scale)
        return pb.SetRatesResponse(from_step=4)

    async def StopRun(self, request: pb.StopRunRequest, context: Any) -> pb.StopRunResponse:
        self.calls.append(f"stop {'after the step: ' if request.after_step else ''}{request.reason}")
        self._write_calls()
        if request.after_step and self.deaf:
            return pb.StopRunResponse()
        if not self.stopped.done():
            self.stopped.set_result(request.reason)
        return pb.StopRunResponse()

    async def Watch(self, request: pb.WatchRequest, context: Any) -> AsyncIterator[pb.WatchEvent]:
        for event in self.script:
            yield event
        if self.end_after_stop:
            reason = await self.stopped
            yield pb.WatchEvent(end=pb.EndEvent(ok=self.stops_well, message=f"stopped: {reason}"))


async def serve(controller: FakeController, *, token: str = "", port: int = 0) -> RunningServer:
    """Serves it on loopback."""
    add = controller_pb2_grpc.add_ControllerServiceServicer_to_server
    return await start_server(add, controller, credentials=Credentials(token=token), port=port)


def step_event(step: int, **metrics: float) -> pb.WatchEvent:
    """A finished step."""
    return pb.WatchEvent(step=pb.StepEvent(step=step, metrics=metrics))


def notice_event(message: str) -> pb.WatchEvent:
    """A sentence for people."""
    return pb.WatchEvent(notice=pb.NoticeEvent(message=message))


def end_event(*, ok: bool, message: str) -> pb.WatchEvent:
    """The end."""
    return pb.WatchEvent(end=pb.EndEvent(ok=ok, message=message))


async def _main(context: ServiceContext) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--address-file", type=Path, required=True)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--port", type=int, default=0)
    args, _ = parser.parse_known_args()
    controller = FakeController()
    if "FAKE_MEMBERS" in os.environ:
        controller.members_file = Path(os.environ["FAKE_MEMBERS"])
    if "FAKE_CALLS" in os.environ:
        controller.calls_file = Path(os.environ["FAKE_CALLS"])
    steps = [step_event(step, **{"critic/score/mean": step / 2}) for step in (1, 2)]
    match os.environ.get("FAKE_SCRIPT", "steps"):
        case "steps":
            controller.script = [*steps, end_event(ok=True, message="2 steps done")]
        case "fail":
            controller.script = [*steps, end_event(ok=False, message="COLLECT: the barrier is stuck")]
        case "train" | "train on" as script:
            phase = pb.PhaseEvent(step=1, phase="dispatch")
            controller.script = [pb.WatchEvent(phase=phase)]
            controller.stops_well, controller.deaf = True, script == "train on"
        case "collect":
            phase = pb.PhaseEvent(step=1, phase="collect", admitted=1, wanted=4)
            controller.script = [pb.WatchEvent(phase=phase)]
        case "idle":
            controller.script = []
        case _:
            controller.script = steps
    server = await serve(controller, token=Credentials.from_env().token, port=args.port)
    context.defer("server", lambda: server.stop(0.2))
    write_atomically(args.address_file, server.address)
    await context.stopping.wait()
    write_atomically(args.run_dir / "controller.calls", "\n".join(controller.calls))


if __name__ == "__main__":
    sys.exit(run_service(_main, name="controller"))
