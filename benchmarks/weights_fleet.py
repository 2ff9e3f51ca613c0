"""Controls the processes of a case of `weights.py` over pipes: starts them, forms groups, pushes."""

from __future__ import annotations

import os
import socket
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from weights_sides import TIMEOUT_S, Case, serve

from paceline.weights.digest.agreement import disagreement
from paceline.weights.geometry.layout import RankLayout
from paceline.weights.plan.backend import choose_wire
from paceline.weights.plan.plan import TransferPlan
from paceline.weights.plan.spec import WeightGroupSpec
from paceline.weights.receipt import PushReceipt

START_S = 400.0
HEAD_START_S = 0.01
"""Seconds by which receivers start before learners"""


@dataclass
class Fleet:
    """The processes of one case."""

    case: Case
    learners: list[Connection] = field(default_factory=list)
    servers: list[Connection] = field(default_factory=list)
    processes: list[Any] = field(default_factory=list)
    epoch: int = 0
    compare_ms: float = 0.0

    def start(self, folder: str, gpus: Sequence[str]) -> None:
        """Starts all processes; returns before they are ready."""
        case = self.case
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        for rank in range(case.num_learners):
            self.learners.append(self._spawn("learner", (case, rank, port), gpus[rank : rank + 1]))
        for index in range(case.num_engines):
            begin = index * case.parallel_size + (0 if case.colocated else case.num_learners)
            self.servers.append(
                self._spawn("server", (case, folder), gpus[begin : begin + case.parallel_size])
            )

    def _spawn(self, kind: str, arguments: tuple[Any, ...], gpus: Sequence[str]) -> Connection:
        context = get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=serve, args=(theirs, kind, arguments))
        before = os.environ.get("CUDA_VISIBLE_DEVICES")
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        process.start()
        if before is None:
            del os.environ["CUDA_VISIBLE_DEVICES"]
        else:
            os.environ["CUDA_VISIBLE_DEVICES"] = before
        theirs.close()
        self.processes.append(process)
        return ours

    def ready(self) -> None:
        """Waits until all processes are ready."""
        answers([*self.learners, *self.servers], START_S)

    def all(self, method: str, worker_method: str, *args: Any) -> tuple[list[Any], list[list[Any]]]:
        """Calls all learner ranks and all engines' workers at the same time."""
        order(self.learners, method, *args)
        order(self.servers, worker_method, *args)
        return answers(self.learners), answers(self.servers)

    def describe(self, round_bytes: int, relay: str, backend: Any = "auto") -> TransferPlan:
        """Makes the spec of the next group; returns the group's transfer plan."""
        self.epoch += 1
        order(self.learners, "layout")
        order(self.servers, "layout")
        learners = answers(self.learners)
        needed = [[RankLayout.from_bytes(data) for data in layouts] for layouts in answers(self.servers)]
        host, port = learners[0][1]
        layouts = [RankLayout.from_bytes(data) for data, _ in learners]
        wire = choose_wire(backend, layouts, [layout for server in needed for layout in server])
        spec = WeightGroupSpec(
            epoch=self.epoch,
            backend=wire.backend,
            shared=wire.shared,
            store_host=host,
            store_port=port,
            learner_layouts=tuple(layouts),
            rollout_layouts=tuple(layout for layouts in needed for layout in layouts),
            wire_dtype=self.case.dtype,
            round_bytes=round_bytes,
            relay=relay,
            timeout_s=TIMEOUT_S,
        )
        self.spec = spec.to_bytes()
        return spec.build_plan()

    def form(self) -> float:
        """Forms the group described last; returns the milliseconds until all have joined."""
        began = time.perf_counter()
        order(self.learners, "join", self.spec)
        self._order_servers("join")
        answers([*self.learners, *self.servers])
        return 1e3 * (time.perf_counter() - began)

    def _order_servers(self, method: str) -> None:
        for index, server in enumerate(self.servers):
            server.send((method, (self.spec, self.case.num_learners + index * self.case.parallel_size)))

    def push(
        self, version: int, head_start_s: float, *, change: bool = True
    ) -> tuple[float, float, list[Any], list[Any]]:
        """Changes the weights, unless told not to, and pushes them.

        Returns:
            Milliseconds of the transfer, milliseconds of the pause, and the answers of learners and servers.
        """
        if change:
            order(self.learners, "change")
            answers(self.learners)
        began = time.perf_counter()
        order(self.servers, "push", version)
        time.sleep(head_start_s)
        order(self.learners, "push", version)
        sent, received = answers(self.learners), answers(self.servers)
        answered = time.perf_counter()
        for answer in (*sent, *received):
            answer["receipt"] = PushReceipt.from_bytes(answer["receipt"])
        (report,) = sent[0]["receipt"].reports
        for answer in received:
            difference = disagreement(report, answer["receipt"].reports)
            if difference is not None:
                raise SystemExit(difference)
        ended = time.perf_counter()
        pause_ms = 1e3 * (ended - began)
        self.compare_ms = 1e3 * (ended - answered)
        transfer = max(answer["received"] for answer in received) - min(answer["began"] for answer in sent)
        return 1e3 * transfer, pause_ms, sent, received

    def trace(self, version: int, folder: Path) -> None:
        """Traces every rank during one push, after another to warm up."""
        for keep in (tempfile.gettempdir(), str(folder)):
            self.all("trace", "paceline_trace", None)
            self.push(version, HEAD_START_S)
            self.all("trace", "paceline_trace", keep)

    def usual(self, repeats: int) -> float:
        """Returns the median milliseconds of the usual way."""
        order(self.learners, "usual_join", self.spec)
        self._order_servers("paceline_usual_join")
        answers([*self.learners, *self.servers])
        order(self.learners[:1], "names")
        names = answers(self.learners[:1])[0]
        spans = []
        for _ in range(repeats + 1):
            order(self.servers, "paceline_usual", names)
            order(self.learners, "usual", self.case.dtype)
            sent, loaded = answers(self.learners), answers(self.servers)
            ended = max(reply["ended"] for replies in loaded for reply in replies)
            spans.append(1e3 * (ended - min(answer["began"] for answer in sent)))
        self.all("usual_leave", "paceline_usual_leave")
        return statistics.median(spans[1:])

    def stop(self) -> None:
        """Ends all processes."""
        for pipe in [*self.learners, *self.servers]:
            pipe.close()
        for process in self.processes:
            process.join(20)
            if process.is_alive():
                process.kill()


def order(pipes: list[Connection], method: str, *args: Any) -> None:
    """Sends a call to all processes."""
    for pipe in pipes:
        pipe.send((method, args))


def answers(pipes: list[Connection], timeout_s: float = 3 * TIMEOUT_S) -> list[Any]:
    """Returns the answer of each process; exits if a process failed."""
    received = []
    for pipe in pipes:
        if not pipe.poll(timeout_s):
            raise SystemExit("a process does not answer")
        received.append(pipe.recv())
    for answer in received:
        if isinstance(answer, BaseException):
            raise SystemExit(f"a process failed: {answer!r}")
    return received
