"""Baselines of `weights.py`: the same bytes as plain messages, and the usual gather and broadcast."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore

from paceline.weights.plan.spec import WeightGroupSpec
from paceline.weights.transport.group import DTYPES, WeightGroup
from paceline.weights.transport.rendezvous import Deadline, make_process_group

TIMEOUT_S = 120.0
BUFFER_BYTES = 1 << 30
_EPOCHS_ASIDE = 1_000_000


def plain_messages(group: WeightGroup, repeats: int) -> list[float]:
    """Returns the milliseconds of each of `repeats` rounds, without pauses.

    In a round, each pair of ranks exchanges one message with as many bytes as a push moves between them.
    """
    sizes: tuple[dict[int, int], dict[int, int]] = ({}, {})
    for direction, rounds in enumerate((group.layout.sends, group.layout.receives)):
        for message in itertools.chain.from_iterable(rounds):
            peer = message.key.sender if direction else message.key.receiver
            sizes[direction][peer] = sizes[direction].get(peer, 0) + message.size
    dtype = DTYPES[group.spec.wire_dtype]
    shared = torch.ones(max(sizes[0].values(), default=0), dtype=dtype, device=group.device)
    sends = [(shared[:size], peer) for peer, size in sizes[0].items()]
    receives = [
        (torch.empty(size, dtype=dtype, device=group.device), peer) for peer, size in sizes[1].items()
    ]
    deadline = Deadline("plain messages", TIMEOUT_S)
    marks = [mark(group.device)]
    for number in range(repeats + 1):
        ends = [[(tensor, peer, 1 << 16 | number) for tensor, peer in side] for side in (sends, receives)]
        group._post(ends[0], ends[1], deadline).wait(deadline)
        marks.append(mark(group.device))
    group._finish(deadline)
    # The first round includes the wait for the other ranks.
    return [milliseconds(a, b) for a, b in itertools.pairwise(marks[1:])]


def mark(device: torch.device) -> Any:
    """Returns an event in the device's queue, or the current time on the CPU."""
    if device.type != "cuda":
        return time.perf_counter()
    event: Any = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def milliseconds(begin: Any, end: Any) -> float:
    """Returns milliseconds between two marks that have passed."""
    return float(1e3 * (end - begin)) if isinstance(begin, float) else float(begin.elapsed_time(end))


class Trace:
    """Profiles the process on CPU and GPU from `begin` to `end`, for a trace viewer.

    The first profile of a process is slow, so take one to warm up.
    """

    def __init__(self) -> None:
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profile = torch.profiler.profile(activities=activities)

    def begin(self) -> None:
        """Begins the profile."""
        self._profile.start()

    def end(self, path: Path) -> None:
        """Ends the profile and writes the file."""
        self._profile.stop()
        self._profile.export_chrome_trace(str(path))


class Broadcast:
    """The usual way: learner rank 0 packs full tensors into large buffers and broadcasts them."""

    def __init__(
        self, spec: WeightGroupSpec, rank: int, device: torch.device, store: TCPStore | None
    ) -> None:
        spec = dataclasses.replace(
            spec, epoch=spec.epoch + _EPOCHS_ASIDE, learner_layouts=spec.learner_layouts[:1]
        )
        deadline = Deadline("usual way", TIMEOUT_S)
        if store is None:
            left = deadline.remaining("learner rank 0")
            store = TCPStore(spec.store_host, spec.store_port, timeout=left, wait_for_workers=False)
        self._group, self._device = make_process_group(spec, rank, store, deadline), device
        self._dtype = DTYPES[spec.wire_dtype]
        self._room = BUFFER_BYTES // self._dtype.itemsize
        self._buffers: list[torch.Tensor] = []
        # The first message makes the connections.
        self._group.broadcast([torch.zeros(1, device=device)]).wait()

    def send(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Sends full tensors from learner rank 0; they need not outlive the call."""
        filled, number, works = 0, 0, list[Any]()
        for _, tensor in tensors:
            if filled and filled + tensor.numel() > self._room:
                works.append(self._group.broadcast([self._buffer(number)[:filled]]))
                filled, number = 0, number + 1
                if number >= 2:
                    works[number - 2].wait()
            self._buffer(number, tensor.numel())[filled : filled + tensor.numel()].copy_(tensor.reshape(-1))
            filled += tensor.numel()
        works.append(self._group.broadcast([self._buffer(number)[:filled]]))
        for work in works[-2:]:
            work.wait()

    def receive(
        self, tensors: list[tuple[str, list[int]]], load: Callable[[Iterator[tuple[str, torch.Tensor]]], Any]
    ) -> None:
        """Receives on a rollout rank; `load` gets every full tensor."""
        batches: list[list[tuple[str, list[int], int]]] = [[]]
        filled = 0
        for name, shape in tensors:
            size = torch.Size(shape).numel()
            if filled and filled + size > self._room:
                batches.append([])
                filled = 0
            batches[-1].append((name, shape, filled))
            filled += size
        works = [self._take(batches, 0)]
        for number, batch in enumerate(batches):
            if number + 1 < len(batches):
                works.append(self._take(batches, number + 1))
            works[number].wait()
            buffer = self._buffer(number)
            load((name, buffer[at : at + torch.Size(shape).numel()].view(shape)) for name, shape, at in batch)

    def _take(self, batches: list[list[tuple[str, list[int], int]]], number: int) -> Any:
        _, shape, at = batches[number][-1]
        size = at + torch.Size(shape).numel()
        return self._group.broadcast([self._buffer(number, size)[:size]])

    def _buffer(self, number: int, size: int = 0) -> torch.Tensor:
        """Returns one of two buffers, enlarged if a tensor needs more."""
        while len(self._buffers) < 2:
            self._buffers.append(torch.empty(self._room, dtype=self._dtype, device=self._device))
        if self._buffers[number % 2].numel() < size:
            self._buffers[number % 2] = torch.empty(size, dtype=self._dtype, device=self._device)
        return self._buffers[number % 2]

    def close(self) -> None:
        """Frees connections and buffers."""
        self._group.abort()
        self._buffers = []
