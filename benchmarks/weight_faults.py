"""Injects faults into a weight group of two processes, and measures when the healthy one notices.

    python benchmarks/weight_faults.py                       # two GPUs, about four minutes
    python benchmarks/weight_faults.py --device cpu          # the same over gloo, without the network part

`network` disables P2P and shared memory, so that NCCL uses sockets as between machines, and kills the
receiver in a push. The learner also has its own group, as for FSDP. torch's watchdog and monitor would end
the healthy process; with Paceline's group they must not (`docs/decisions/0015`). After every fault the
learner forms a new group with a fresh receiver and pushes again. After `network` it does so a second time,
when torch's threads would have ended the process.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

from rich.console import Console
from rich.table import Table

WATCHDOG_S = 100.0
NETWORK = {
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_IB_DISABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "15",
}
"""Makes NCCL use sockets, and torch's monitor end the process within seconds (default: 8 minutes)"""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Size and transport of a push."""

    device: str
    layers: int
    width: int

    @property
    def backend(self) -> str:
        """Returns the backend of the weight group."""
        return "nccl" if self.device == "cuda" else "gloo"

    @property
    def deadline_s(self) -> float:
        """Returns the deadline of a join or push; NCCL needs seconds to connect, and to push over sockets."""
        return 20.0 if self.device == "cuda" else 8.0


# --- a rank's process


class Member:
    """Answers a rank's calls in its own process."""

    def __init__(self, options: Options, kind: str, gpu: int) -> None:
        import torch

        from paceline.learner.distributed.publisher import WeightPublisher
        from paceline.rollout.engines.rank_receiver import RankReceiver

        torch.set_num_threads(1)
        self._options, self._kind = options, kind
        self._device = torch.device("cuda", gpu) if options.device == "cuda" else torch.device("cpu")
        if options.device == "cuda":
            torch.cuda.set_device(self._device)
        size, layers = options.width, 1 if kind == "plain" else options.layers
        made = {"device": self._device, "dtype": torch.bfloat16}
        model = torch.nn.Sequential(*(torch.nn.Linear(size, size, bias=False, **made) for _ in range(layers)))
        self._publisher = WeightPublisher(model, self._device)
        self._receiver = RankReceiver(model, self._device, lambda _: self._publisher.layout(), refuse)

    def layout(self) -> bytes:
        """Returns the rank's layout."""
        return self._publisher.layout().to_bytes()

    def store(self) -> tuple[str, int]:
        """Returns the address of the rendezvous."""
        return self._publisher.open_store()

    def join(self, spec: bytes, fault: str = "") -> None:
        """Joins a group, with a fault if one is given."""
        from paceline.weights.plan.spec import WeightGroupSpec
        from paceline.weights.transport import group

        if fault == "dies":
            group.make_process_group = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        elif fault == "no memory":
            group.WeightGroup._allocate = refuse  # type: ignore[method-assign]
        parsed = WeightGroupSpec.from_bytes(spec)
        if self._kind == "learner":
            self._publisher.join(parsed)
        else:
            self._receiver.join(parsed, 1, self._options.deadline_s)

    def push(self, version: int) -> int:
        """Sends or receives a version; returns the bytes."""
        if self._kind == "learner":
            return self._publisher.publish(version, timeout_s=self._options.deadline_s).num_bytes
        return self._receiver.receive(version, self._options.deadline_s).num_bytes

    def own_group(self, port: int) -> None:
        """Makes the process's default group over NCCL, as FSDP does in the learner, and uses it."""
        import torch.distributed as dist

        store = dist.TCPStore("127.0.0.1", port, is_master=True)
        dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=self._device)
        self.use_own_group()

    def use_own_group(self) -> None:
        """Sends a message in the default group, and waits for it."""
        import torch
        import torch.distributed as dist

        dist.all_reduce(torch.ones(1, device=self._device))
        torch.cuda.synchronize()

    def plain(self, rank: int, port: int) -> None:
        """Uses torch's plain ProcessGroupNCCL: rank 0 sends for ever, rank 1 receives."""
        import torch
        from torch.distributed import ProcessGroupNCCL, TCPStore

        store: Any = TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
        group: Any = ProcessGroupNCCL(store, rank, 2, ProcessGroupNCCL.Options())
        tensor = torch.zeros(1 << 28, device=self._device, dtype=torch.uint8)
        while True:
            if rank == 0:
                group.send([tensor], 1, 0).wait()
            else:
                group.recv([tensor], 0, 0).wait()
            done = torch.cuda.Event()
            done.record()
            while not done.query():
                time.sleep(0.001)


def refuse(*args: object) -> Any:
    """Raises an error in place of an allocation."""
    from paceline.core.errors import WeightSyncError

    raise WeightSyncError("no memory for staging")


def rank_main(pipe: Any, options: Options, kind: str, gpu: int) -> None:
    """Answers calls until the pipe closes."""
    faulthandler.register(signal.SIGUSR1)
    member = Member(options, kind, gpu)
    pipe.send("ready")
    while True:
        try:
            method, args = pipe.recv()
        except EOFError:
            return
        began = time.monotonic()
        try:
            answer = ("ok", getattr(member, method)(*args))
        except Exception as error:  # noqa: BLE001  sent to the parent
            answer = (type(error).__name__, f"{error} [peer: {getattr(error, 'peer', '-')}]")
        pipe.send((*answer, time.monotonic() - began))


# --- the parent


class Rank:
    """Controls a rank's process from outside."""

    def __init__(self, options: Options, kind: str, gpu: int) -> None:
        context = get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=rank_main, args=(theirs, options, kind, gpu), daemon=True)
        self.process.start()
        theirs.close()
        if not self._pipe.poll(90) or self._pipe.recv() != "ready":
            raise TimeoutError(f"the {kind} did not start")

    def begin(self, method: str, *args: Any) -> None:
        """Calls a method; `result` has the answer."""
        self._pipe.send((method, args))

    def result(self, timeout_s: float = 60.0) -> tuple[str, Any, float]:
        """Returns ("ok", value, seconds), or the error's class, text and seconds; "dead" if it died."""
        try:
            if self._pipe.poll(timeout_s):
                answer: tuple[str, Any, float] = self._pipe.recv()
                return answer
        except (EOFError, ConnectionError):
            self.process.join(10)
            return "dead", self.process.exitcode, 0.0
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGUSR1)  # makes it print its stack
        time.sleep(1.0)
        return "no answer", None, timeout_s

    def call(self, method: str, *args: Any) -> Any:
        """Makes a call that must succeed; returns its answer."""
        self.begin(method, *args)
        kind, value, _ = self.result()
        if kind != "ok":
            raise RuntimeError(f"{method}: {kind}: {value}")
        return value

    def kill(self) -> None:
        """Ends the process at once."""
        self.process.kill()
        self.process.join(10)


class Pair:
    """A learner on GPU 0, and changing receivers on GPU 1."""

    def __init__(self, options: Options) -> None:
        self.options, self.epoch, self.version = options, 0, 0
        self.learner, self.receiver = Rank(options, "learner", 0), Rank(options, "rollout", 1)
        self.host, self.port = self.learner.call("store")

    def begin_join(self, fault: str = "") -> None:
        """Begins to form the next group, with a fault in the receiver."""
        from paceline.weights.geometry.layout import RankLayout
        from paceline.weights.plan.spec import WeightGroupSpec

        self.epoch += 1
        layouts = [RankLayout.from_bytes(rank.call("layout")) for rank in (self.learner, self.receiver)]
        spec = WeightGroupSpec(
            epoch=self.epoch,
            backend=self.options.backend,
            store_host=self.host,
            store_port=self.port,
            learner_layouts=(layouts[0],),
            rollout_layouts=(layouts[1],),
            wire_dtype="bfloat16",
            round_bytes=self.options.width * self.options.width * 4,
            timeout_s=self.options.deadline_s,
        ).to_bytes()
        self.learner.begin("join", spec)
        self.receiver.begin("join", spec, fault)

    def begin_push(self) -> None:
        """Begins to push the next version."""
        self.version += 1
        self.learner.begin("push", self.version)
        self.receiver.begin("push", self.version)

    def must(self) -> None:
        """Requires that both ranks succeeded."""
        answers = [rank.result()[:2] for rank in (self.learner, self.receiver)]
        if any(kind != "ok" for kind, _ in answers):
            raise RuntimeError("; ".join(f"{kind}: {value}" for kind, value in answers))

    def recover(self) -> str:
        """Starts a receiver, forms a group and pushes; returns the text for the table."""
        began = time.monotonic()
        self.receiver.kill()
        self.receiver = Rank(self.options, "rollout", 1)
        started = time.monotonic()
        self.begin_join()
        self.must()
        self.begin_push()
        self.must()
        return f"new group and push {time.monotonic() - started:.1f} s (process {started - began:.0f} s)"

    def close(self) -> None:
        """Ends both processes."""
        self.learner.kill()
        self.receiver.kill()


Row = tuple[str, bool, str]


def memory(pair: Pair) -> Row:
    """Lets the receiver lack memory for staging; the learner must notice at once."""
    pair.begin_join("no memory")
    kind, text, seconds = pair.learner.result()
    own = pair.receiver.result()[0]
    good = kind == "PeerLostError" and "rollout rank 0" in text and seconds < 3 and own == "WeightSyncError"
    return f"{kind} after {seconds:.2f} s: {text}", good, pair.recover()


def between(pair: Pair) -> Row:
    """Lets the receiver die between roll call and connection, without a cancellation."""
    pair.begin_join("dies")
    kind, text, seconds = pair.learner.result()
    good = kind in ("DeadlineError", "PeerLostError") and seconds < pair.options.deadline_s + 3
    return f"{kind} after {seconds:.2f} s: {text}", good, pair.recover()


def called_off(pair: Pair) -> Row:
    """Does the same as `between`, but cancels the join after a second, as the controller does."""
    from paceline.weights.transport.rendezvous import abandon

    pair.begin_join("dies")
    time.sleep(1.0)
    abandon(pair.host, pair.port, epoch=pair.epoch, lost="rollout-0", timeout_s=5.0)
    kind, text, seconds = pair.learner.result()
    good = kind == "PeerLostError" and seconds < 3
    return f"{kind} after {seconds:.2f} s: {text}", good, pair.recover()


def hung(pair: Pair) -> Row:
    """Stops the receiver in a push; the learner's deadline must end it."""
    pair.begin_join()
    pair.must()
    pid = pair.receiver.process.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    pair.begin_push()
    kind, text, seconds = pair.learner.result()
    good = kind == "DeadlineError" and seconds < pair.options.deadline_s + 3
    return f"{kind} after {seconds:.2f} s: {text}", good, pair.recover()


def network(options: Options) -> list[tuple[str, Row]]:
    """Kills the receiver in a push over sockets, with torch's default group on the same GPUs."""
    with environment(NETWORK):
        pair, plain = Pair(options), [Rank(options, "plain", gpu) for gpu in range(2)]
        pair.learner.call("own_group", free_port())
        port = free_port()
        for number, rank in enumerate(plain):
            rank.begin("plain", number, port)
        pair.begin_join()
        pair.must()
        time.sleep(3.0)
        pair.begin_push()
        time.sleep(0.5)
        pair.receiver.kill()
        plain[1].kill()
        began = time.monotonic()
        kind, text, seconds = pair.learner.result()
        print(f"in the push over sockets: {kind} after {seconds:.2f} s: {text}", flush=True)
        recovered = "-" if kind == "no answer" else pair.recover()
        plain[0].process.join(WATCHDOG_S)
        code = plain[0].process.exitcode
        died = "lives on" if code is None else f"ended with {code} after {time.monotonic() - began:.0f} s"
        time.sleep(max(0.0, WATCHDOG_S - (time.monotonic() - began)))
        alive = pair.learner.process.is_alive()
        if alive and kind != "no answer":
            pair.learner.call("use_own_group")
            recovered += "; again later: " + pair.recover()
        pair.close()
        plain[0].kill()
    said = f"{kind} after {seconds:.2f} s: {text}; {'alive' if alive else 'DEAD'} after {WATCHDOG_S:.0f} s"
    return [
        ("network, torch's default", (died, True, "(for comparison)")),
        ("network, ours", (said, alive and kind not in ("ok", "no answer"), recovered)),
    ]


@contextmanager
def environment(variables: dict[str, str]) -> Iterator[None]:
    """Sets variables for processes that are started within the block."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def free_port() -> int:
    """Returns a port that is free now."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


PARTS: dict[str, Callable[[Pair], Row]] = {
    "no memory": memory,
    "dies between": between,
    "dies between, called off": called_off,
    "hung in a push": hung,
}


def main() -> int:
    """Runs the parts and prints the table; returns 1 if a result is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only-network", action="store_true", help="run only the part over sockets")
    args = parser.parse_args()
    cuda = args.device == "cuda"
    options = Options(device=args.device, layers=256 if cuda else 8, width=4096 if cuda else 64)
    rows: list[tuple[str, Row]] = []
    parts = {} if args.only_network else PARTS
    pair = Pair(options)
    for name, part in parts.items():
        try:
            rows.append((name, part(pair)))
        except (RuntimeError, TimeoutError) as error:
            rows.append((name, (str(error), False, "-")))
            pair.close()
            pair = Pair(options)
        print(rows[-1], flush=True)
    pair.close()
    if cuda:
        rows += network(options)
    table = Table("fault", "the learner's error", "as it must be", "afterwards")
    for name, (said, good, afterwards) in rows:
        table.add_row(name, said, "yes" if good else "NO", afterwards)
    Console(width=180).print(f"$ {' '.join(sys.argv)}", table)
    return 0 if all(good for _, (_, good, _) in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
