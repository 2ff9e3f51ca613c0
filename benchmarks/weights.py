"""How long a weight push takes from FSDP2 learner ranks to vLLM engines, beside the links' limit and the usual way.

    python benchmarks/weights.py --shapes 0.5B,7B --learners 4 --engines 1x4,2x2,4x1            # 8 GPUs
    python benchmarks/weights.py --shapes 0.5B,7B --learners 2 --engines 1x2,2x1 --at-once      # 4 GPUs
    python benchmarks/weights.py --shapes 7B --learners 1 --engines 3x1                         # 4 GPUs: relaying off and on
    python benchmarks/weights.py --shapes tiny --learners 2 --engines 2x1 --device cpu          # anywhere

`--engines 2x1` is two engines of tensor-parallel size 1. Learner ranks take the first GPUs, engines those after them. The
weights are random and change before every push; the digests of every rank are compared after every push. Where `weights.relay:
auto` would have rollout ranks pass weights on to each other, there is a row without that and one with it.

Columns, medians in milliseconds: `transfer` from the learners' first cast until the last receiver has scattered everything
(receivers wait already); `pause` from the order to both sides until digests agree and prefix caches are reset; `digest` of the
slowest rank on either side; `join` forming the group and forming it anew, `first` the transfer of the first push after each. `plain` is the links'
limit: the same bytes per pair as one message in one grouped call, nothing else. `out GB l/r` is what the busiest learner and the busiest
rollout rank send. `usual` is the usual way: every tensor gathered
in full on all learner ranks in the wire's type, packed into 1 GiB buffers, broadcast from rank 0 to all rollout ranks, loaded
there by the engine's own loader; without digests, from its beginning until the last rank has loaded.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import platform
import socket
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from paceline.reshard.layout import RankLayout
from paceline.reshard.plan import TransferPlan
from paceline.reshard.spec import WeightGroupSpec
from paceline.reshard.transport import plan_of
from paceline.reshard.verdict import DigestReport, digests_agree

HERE = Path(__file__).resolve().parent
TIMEOUT_S = 60.0
START_S = 400.0
HEAD_START_S = 0.01
QWEN: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
}


def shape(
    hidden: int, inner: int, layers: int, heads: int, kv: int, vocab: int, *, tied: bool
) -> dict[str, Any]:
    """A Qwen2 configuration."""
    return QWEN | {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "vocab_size": vocab,
        "tie_word_embeddings": tied,
    }


SHAPES = {
    "tiny": shape(128, 512, 4, 4, 2, 1024, tied=True),
    "0.5B": shape(896, 4864, 24, 14, 2, 151936, tied=True),
    "7B": shape(3584, 18944, 28, 28, 4, 152064, tied=False),
    "32B": shape(5120, 27648, 64, 40, 8, 152064, tied=False),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One table row: a model, learner ranks, engines and their tensor-parallel size."""

    shape: str
    num_learners: int
    num_engines: int
    parallel_size: int
    device: str

    @property
    def dtype(self) -> str:
        """Of the engines' parameters and on the wire."""
        return "bfloat16" if self.device == "cuda" else "float32"

    @property
    def name(self) -> str:
        """As in the arguments."""
        return f"{self.shape} {self.num_learners} -> {self.num_engines}x{self.parallel_size}"


class Learner:
    """One FSDP2 rank with the real publisher over random float32 weights, made on its device shard by shard."""

    def __init__(self, case: Case, rank: int, port: int) -> None:
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor import DTensor
        from transformers import AutoModelForCausalLM, Qwen2Config

        from paceline.learner.weight_publisher import WeightPublisher

        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        self.device = torch.device(case.device, 0) if case.device == "cuda" else torch.device("cpu")
        if case.device == "cuda":
            torch.cuda.set_device(self.device)
        dist.init_process_group(
            "nccl" if case.device == "cuda" else "gloo", rank=rank, world_size=case.num_learners
        )
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(Qwen2Config(**SHAPES[case.shape]), dtype=torch.float32)
        mesh = init_device_mesh(case.device, (case.num_learners,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        model.to_empty(device=self.device)
        self.locals = [p.to_local() for p in model.parameters() if isinstance(p, DTensor)]
        with torch.no_grad():
            for part in self.locals:
                part.normal_(std=0.02)
        self.rank = rank
        self.publisher = WeightPublisher(model, self.device, "nccl" if case.device == "cuda" else "gloo")

    def layout(self) -> tuple[bytes, tuple[str, int] | None]:
        """Its shards, and the rendezvous from rank 0."""
        return self.publisher.layout().to_bytes(), self.publisher.open_store() if self.rank == 0 else None

    def join(self, spec: bytes) -> None:
        """Joins the group."""
        self.publisher.join(WeightGroupSpec.from_bytes(spec))

    @torch.no_grad()
    def change(self) -> None:
        """New weights."""
        for part in self.locals:
            part.mul_(1.01)
        self._synchronize()

    def push(self, version: int) -> dict[str, Any]:
        """Publishes, with the time of day of the beginning."""
        began = time.perf_counter()
        result = self.publisher.publish(version)
        return {
            "began": began,
            "digests": result.digests.to_bytes(),
            "digest_ms": result.digest_ms,
            "transfer_ms": result.transfer_ms,
            "num_bytes": result.bytes,
            "extra_bytes": result.peak_extra_bytes,
        }

    def plain(self, repeats: int) -> list[float]:
        """Plain messages of as many bytes."""
        from weights_exchange import plain_messages

        group = self.publisher._group
        assert group is not None
        return plain_messages(group, repeats)

    def usual_join(self, spec: bytes) -> None:
        """Rank 0 joins the broadcast group."""
        from weights_exchange import Broadcast

        if self.rank == 0:
            self.broadcast = Broadcast(
                WeightGroupSpec.from_bytes(spec), 0, self.device, self.publisher._store
            )

    @torch.no_grad()
    def usual(self, dtype: str) -> dict[str, float]:
        """Gathers every tensor; rank 0 broadcasts them."""
        began = time.perf_counter()
        wire = getattr(torch, dtype)

        def full() -> Iterator[tuple[str, torch.Tensor]]:
            for name, param in self.publisher._parameters().items():
                yield name, param.to(wire).full_tensor()  # type: ignore[attr-defined]

        if self.rank == 0:
            self.broadcast.send(full())
        else:
            for _ in full():
                pass
        self._synchronize()
        return {"began": began, "ended": time.perf_counter()}

    def usual_leave(self) -> None:
        """Lets go of it."""
        if self.rank == 0:
            self.broadcast.close()

    def names(self) -> list[tuple[str, list[int]]]:
        """Every tensor in the order of the broadcast."""
        return [(name, list(param.shape)) for name, param in self.publisher._parameters().items()]

    def memory(self, reset: bool) -> dict[str, int]:
        """Bytes allocated now and at most since the last reset."""
        if self.device.type != "cuda":
            return {"now": 0, "peak": 0}
        found = {"now": torch.cuda.memory_allocated(), "peak": torch.cuda.max_memory_allocated()}
        if reset:
            torch.cuda.reset_peak_memory_stats()
        return found

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


class Server:
    """One engine with the real receiver."""

    def __init__(self, case: Case, folder: str) -> None:
        os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
        sys.path.insert(0, str(HERE))
        self.loop = asyncio.new_event_loop()
        self.loop.run_until_complete(self._start(case, folder))

    async def _start(self, case: Case, folder: str) -> None:
        from paceline.config.load import parse
        from paceline.config.run import RunConfig
        from paceline.rollout.vllm_engine import VllmEngine
        from paceline.rollout.weight_receiver import WeightReceiver

        engine_kwargs = {"kv_cache_memory_bytes": 2 << 30} if case.device == "cuda" else {}
        rollout = {
            "tensor_model_parallel_size": case.parallel_size,
            "enforce_eager": True,
            "max_num_seqs": 16,
            "gpu_memory_utilization": 0.3,
            "engine_kwargs": engine_kwargs,
        }
        config = parse(
            RunConfig,
            {
                "model": {"path": folder, "dtype": case.dtype},
                "data": {"train_files": "none", "max_prompt_length": 128, "max_response_length": 128},
                "rollout": rollout,
                "reward": {"functions": [{"name": "exact_match"}]},
                "trainer": {"total_steps": 1},
            },
        )
        self.engine = await VllmEngine.start(config, worker_extension="weights_worker.TimedExtension")
        self.replies: list[dict[str, Any]] = []
        self.receiver = WeightReceiver(_Recording(self))

    def call(self, method: str, *args: Any) -> Any:
        """Runs a coroutine of this class, or a worker method of that name on every rank."""
        own = getattr(self, method, None)
        work = own(*args) if own is not None else self._everywhere(method, args)
        return self.loop.run_until_complete(work)

    async def layout(self) -> list[bytes]:
        """What each rank needs."""
        return [layout.to_bytes() for layout in await self.receiver.describe()]

    async def join(self, spec: bytes, offset: int) -> None:
        """All ranks join."""
        await self.receiver.join(spec, offset, TIMEOUT_S)

    async def push(self, version: int) -> dict[str, Any]:
        """Receives through the real path; with the ranks' own times of day."""
        ordered = time.perf_counter()
        result = await self.receiver.receive(version, TIMEOUT_S)
        ended = time.perf_counter()
        return {
            "call_ms": 1e3 * (min(reply["began"] for reply in self.replies) - ordered),
            "reset_ms": 1e3 * (ended - max(reply["ended"] for reply in self.replies)),
            "received": max(reply["received"] for reply in self.replies),
            "digests": [report.to_bytes() for report in result.digests],
            "digest_ms": result.digest_ms,
            "rank_bytes": [reply["num_bytes"] for reply in self.replies],
            "extra_bytes": result.peak_extra_bytes,
        }

    async def leave(self) -> None:
        """All ranks leave."""
        await self.receiver.leave()

    async def stop(self) -> None:
        """Ends the engine."""
        await self.engine.shutdown()

    async def _everywhere(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        return await self.engine.collective_rpc(method, TIMEOUT_S, args)


class _Recording:
    """The engine, keeping the workers' last replies to a receive."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self.reset_prefix_cache = server.engine.reset_prefix_cache

    async def collective_rpc(
        self, method: str, timeout: float | None = None, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> list[Any]:
        replies = await self._server.engine.collective_rpc(method, timeout, args, kwargs)
        if method == "paceline_receive" and not any("error" in reply for reply in replies):
            self._server.replies = replies
        return replies


def serve(pipe: Connection, kind: str, arguments: tuple[Any, ...]) -> None:
    """Runs one process: makes the object, then calls what the pipe names."""
    torch.set_num_threads(1)
    sys.path.insert(0, str(HERE))
    try:
        served: Any = Learner(*arguments) if kind == "learner" else Server(*arguments)
        pipe.send(None)
        while True:
            method, args = pipe.recv()
            target = getattr(served, method) if kind == "learner" else served.call
            pipe.send(target(*args) if kind == "learner" else target(method, *args))
    except EOFError:
        if kind == "server":
            served.call("stop")
    except Exception as error:  # noqa: BLE001  the parent shows it
        traceback.print_exc()
        pipe.send(error)


@dataclass
class Fleet:
    """The processes of one case."""

    case: Case
    learners: list[Connection] = field(default_factory=list)
    servers: list[Connection] = field(default_factory=list)
    processes: list[Any] = field(default_factory=list)
    epoch: int = 0
    verdict_ms: float = 0.0

    def start(self, folder: str, gpus: Sequence[str]) -> None:
        """Starts all of them; returns before they are ready."""
        case = self.case
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        for rank in range(case.num_learners):
            self.learners.append(self._spawn("learner", (case, rank, port), gpus[rank : rank + 1]))
        for index in range(case.num_engines):
            begin = case.num_learners + index * case.parallel_size
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
        """Waits until all are."""
        answers([*self.learners, *self.servers], START_S)

    def all(self, method: str, worker_method: str, *args: Any) -> tuple[list[Any], list[list[Any]]]:
        """Calls all learner ranks and all engines' workers at once."""
        order(self.learners, method, *args)
        order(self.servers, worker_method, *args)
        return answers(self.learners), answers(self.servers)

    def describe(self, round_bytes: int, relay: str) -> TransferPlan:
        """Writes the spec of the next group; returns the plan that follows from it."""
        self.epoch += 1
        order(self.learners, "layout")
        order(self.servers, "layout")
        mine = answers(self.learners)
        needed = [[RankLayout.from_bytes(data) for data in layouts] for layouts in answers(self.servers)]
        host, port = mine[0][1]
        spec = WeightGroupSpec(
            epoch=self.epoch,
            backend="nccl" if self.case.device == "cuda" else "gloo",
            store_host=host,
            store_port=port,
            learner_layouts=tuple(RankLayout.from_bytes(data) for data, _ in mine),
            rollout_layouts=tuple(layout for layouts in needed for layout in layouts),
            wire_dtype=self.case.dtype,
            round_bytes=round_bytes,
            relay=relay,
            timeout_s=TIMEOUT_S,
        )
        self.spec = spec.to_bytes()
        return plan_of(spec)

    def form(self) -> float:
        """Forms the group described last; milliseconds from the order to join until all have."""
        began = time.perf_counter()
        order(self.learners, "join", self.spec)
        self._order_servers("join")
        answers([*self.learners, *self.servers])
        return 1e3 * (time.perf_counter() - began)

    def _order_servers(self, method: str) -> None:
        for index, server in enumerate(self.servers):
            server.send((method, (self.spec, self.case.num_learners + index * self.case.parallel_size)))

    def push(self, version: int, head_start_s: float) -> tuple[float, float, list[Any], list[Any]]:
        """Changes the weights and pushes them; milliseconds of transfer and of all, and the answers of both sides."""
        order(self.learners, "change")
        answers(self.learners)
        began = time.perf_counter()
        order(self.servers, "push", version)
        time.sleep(head_start_s)
        order(self.learners, "push", version)
        sent, received = answers(self.learners), answers(self.servers)
        answered = time.perf_counter()
        reports = [DigestReport.from_bytes(data) for one in received for data in one["digests"]]
        digests_agree(DigestReport.from_bytes(sent[0]["digests"]), reports)
        ended = time.perf_counter()
        pause_ms = 1e3 * (ended - began)
        self.verdict_ms = 1e3 * (ended - answered)
        transfer = max(one["received"] for one in received) - min(one["began"] for one in sent)
        return 1e3 * transfer, pause_ms, sent, received

    def usual(self, repeats: int) -> float:
        """Median of the usual way."""
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
            spans.append(1e3 * (ended - min(one["began"] for one in sent)))
        self.all("usual_leave", "paceline_usual_leave")
        return statistics.median(spans[1:])

    def stop(self) -> None:
        """Ends them."""
        for pipe in [*self.learners, *self.servers]:
            pipe.close()
        for process in self.processes:
            process.join(20)
            if process.is_alive():
                process.kill()


def order(pipes: list[Connection], method: str, *args: Any) -> None:
    """Asks all processes."""
    for pipe in pipes:
        pipe.send((method, args))


def answers(pipes: list[Connection], timeout_s: float = 3 * TIMEOUT_S) -> list[Any]:
    """One answer of each; exits where one failed."""
    got = []
    for pipe in pipes:
        if not pipe.poll(timeout_s):
            raise SystemExit("a process does not answer")
        got.append(pipe.recv())
    for answer in got:
        if isinstance(answer, BaseException):
            raise SystemExit(f"a process failed: {answer!r}")
    return got


def measure(
    fleet: Fleet, round_bytes: int, relay: str, repeats: int, *, usual: bool
) -> dict[str, float] | None:
    """All numbers of one case; None where `auto` would relay nothing."""
    plan = fleet.describe(round_bytes, relay)
    if relay == "auto" and not plan.relay_pairs:
        return None
    join_ms = fleet.form()
    fleet.all("memory", "paceline_memory", True)
    version, transfers, pauses, parts = 0, list[float](), list[float](), list[list[float]]()
    digests_l, digests_r = list[float](), list[float]()
    for version in range(repeats + 1):
        transfer, _, sent, received = fleet.push(version, HEAD_START_S)
        transfers.append(transfer)
        digests_l.append(max(one["digest_ms"] for one in sent))
        digests_r.append(max(one["digest_ms"] for one in received))
    for again in range(repeats):
        _, pause, _, received = fleet.push(version + 1 + again, 0.0)
        pauses.append(pause)
        parts.append([max(one[k] for one in received) for k in ("call_ms", "reset_ms")] + [fleet.verdict_ms])
    grown = [one["peak"] - one["now"] for one in fleet.all("memory", "paceline_memory", True)[0]]
    ours, theirs = fleet.all("plain", "paceline_plain", repeats)
    slowest = [ms for replies in theirs for ms in [reply["ms"] for reply in replies]]
    plain = statistics.median(max(column) for column in zip(*slowest, strict=True))
    row = {
        "join": join_ms,
        "first": transfers[0],
        "transfer": statistics.median(transfers[1:]),
        "best": min(transfers[1:]),
        "worst": max(transfers[1:]),
        "pause": statistics.median(pauses),
        "call": statistics.median(one[0] for one in parts),
        "reset": statistics.median(one[1] for one in parts),
        "verdict": statistics.median(one[2] for one in parts),
        "digest_learner": statistics.median(digests_l[1:]),
        "digest_rollout": statistics.median(digests_r[1:]),
        "plain": plain,
        "plain_learner": statistics.median(max(column) for column in zip(*ours, strict=True)),
        "rank_bytes": max(size for one in received for size in one["rank_bytes"]),
        "sent_bytes": max(one["num_bytes"] for one in sent),
        "relayed_bytes": max(plan.relayed_bytes(rank) for rank in range(plan.num_destinations)),
        "rounds": plan.num_rounds,
        "extra_learner": max(one["extra_bytes"] for one in sent),
        "extra_rollout": max(one["extra_bytes"] for one in received),
        "grown_learner": max(grown),
        "pushes": 3 * repeats + 2,
    }
    fleet.describe(round_bytes, relay)
    row["rejoin"] = fleet.form()
    again = [fleet.push(version + 1 + number, HEAD_START_S)[0] for number in range(repeats + 1)]
    row |= {"first_again": again[0], "transfer_again": statistics.median(again[1:])}
    row["usual"] = fleet.usual(max(3, repeats // 3)) if usual else float("nan")
    return row


HEADINGS = (
    "case", "relay", "round MiB", "join", "first", "transfer", "min..max", "digest l/r", "pause", "plain", "transfer/plain", "GB/rank", "GB/s",
    "out GB l/r", "extra MiB l/r", "usual", "usual/transfer",
)  # fmt: skip


def cells(case: Case, relay: str, round_mib: int, row: dict[str, float]) -> list[str]:
    """One row of the table."""
    gb = row["rank_bytes"] / 1e9
    return [
        case.name,
        "off" if relay == "never" else "on",
        str(round_mib),
        f"{row['join']:.0f}/{row['rejoin']:.0f}",
        f"{row['first']:.1f}/{row['first_again']:.1f}",
        f"{row['transfer']:.1f}",
        f"{row['best']:.1f}..{row['worst']:.1f}",
        f"{row['digest_learner']:.1f}/{row['digest_rollout']:.1f}",
        f"{row['pause']:.1f}",
        f"{row['plain']:.1f}",
        f"{row['transfer'] / row['plain']:.2f}",
        f"{gb:.2f}",
        f"{1e3 * gb / row['transfer']:.0f}",
        f"{row['sent_bytes'] / 1e9:.2f}/{row['relayed_bytes'] / 1e9:.2f}",
        f"{row['extra_learner'] / 2**20:.0f}/{row['extra_rollout'] / 2**20:.0f}",
        f"{row['usual']:.0f}",
        f"{row['usual'] / row['transfer']:.1f}",
    ]


@contextlib.contextmanager
def running(cases: list[Case], gpus: Sequence[str], folder: Path) -> Iterator[list[Fleet]]:
    """The fleets of these cases, all started together."""
    fleets = [Fleet(case) for case in cases]
    try:
        for fleet in fleets:
            place = folder / fleet.case.shape
            place.mkdir(exist_ok=True)
            (place / "config.json").write_text(
                json.dumps(SHAPES[fleet.case.shape] | {"torch_dtype": fleet.case.dtype})
            )
            fleet.start(str(place), gpus)
        for fleet in fleets:
            fleet.ready()
        yield fleets
    finally:
        for fleet in fleets:
            fleet.stop()


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shapes", default="0.5B,7B", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--learners", type=int, default=4, help="FSDP2 ranks")
    parser.add_argument("--engines", default="1x4,2x2,4x1", help="engines x tensor-parallel size, each a row")
    parser.add_argument("--round-mib", default="256", help="largest message of a pair; each a row")
    parser.add_argument(
        "--relay", default="never,auto", help="of never, auto, always; a row each, auto where it relays"
    )
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--no-usual", action="store_true", help="leave the usual way out")
    parser.add_argument(
        "--at-once",
        action="store_true",
        help="start all engines and learners together and measure one after the other",
    )
    parser.add_argument("--json", type=Path, help="write all numbers here")
    return parser.parse_args()


def main() -> None:
    """Prints the table."""
    args = parse_args()
    layouts = [tuple(map(int, word.split("x"))) for word in args.engines.split(",")]
    cases = [
        Case(shape=name, num_learners=args.learners, num_engines=e, parallel_size=p, device=args.device)
        for name in args.shapes.split(",")
        for e, p in layouts
    ]
    needed = max(case.num_learners + case.num_engines * case.parallel_size for case in cases)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = visible.split(",") if visible else [str(index) for index in range(needed)]
    table = Table(title=f"weight pushes, medians of {args.repeats}, milliseconds")
    for heading in HEADINGS:
        table.add_column(heading, justify="right")
    found, console = [], Console(width=210)
    with tempfile.TemporaryDirectory() as folder:
        for batch in [cases] if args.at_once else [[case] for case in cases]:
            with running(batch, gpus, Path(folder)) as fleets:
                for fleet in fleets:
                    usual = not args.no_usual
                    variants = itertools.product(map(int, args.round_mib.split(",")), args.relay.split(","))
                    for round_mib, relay in variants:
                        row = measure(fleet, round_mib << 20, relay, args.repeats, usual=usual)
                        if row is None:
                            continue
                        usual = False
                        table.add_row(*cells(fleet.case, relay, round_mib, row))
                        name = {"case": fleet.case.name, "relay": relay, "round_mib": round_mib}
                        found.append(name | row)
                        print(json.dumps(found[-1]), flush=True)
                        if args.json:
                            args.json.write_text(json.dumps(found, indent=1))
    console.print(table)
    model = torch.cuda.get_device_name() if args.device == "cuda" else platform.processor()
    console.print(f"machine: {needed} x {model}, {os.cpu_count()} cores, torch {torch.__version__}")
    console.print(f"command: python {' '.join(sys.argv)}")


if __name__ == "__main__":
    main()
