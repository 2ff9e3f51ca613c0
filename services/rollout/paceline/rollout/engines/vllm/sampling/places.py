"""A batched sampler's tables: random numbers for tokens, and log-probabilities until they are fetched."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.core.errors import WeightSyncError
from paceline.rollout.engines.sampling.draw import uniforms


class Places:
    """Tables with a row per request: the numbers that its tokens are drawn by, and its log-probabilities.

    When rows run out, rows of ended requests are copied to the host until they are fetched.

    Args:
        num_rows: number of rows; more than the requests that run at a time.
        length: positions of a row.
        is_running: whether the worker still knows a request.
    """

    def __init__(
        self, num_rows: int, length: int, device: torch.device, is_running: Callable[[str], bool]
    ) -> None:
        self.numbers = torch.zeros(num_rows, length, dtype=torch.float64, device=device)
        self.log_probs = torch.zeros(num_rows, length, dtype=torch.float32, device=device)
        self._is_running = is_running
        self._free = list(range(num_rows))
        self._taken: dict[str, int] = {}
        self._ended: dict[str, Tensor] = {}
        self._forgotten: set[str] = set()
        self._version = -1
        self._begins: dict[str, list[tuple[int, int]]] = {}
        self._before: dict[str, Tensor] = {}
        self._device = device
        self._stream: Any = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def rows_of(self, seeds: dict[str, int]) -> Tensor:
        """Returns the rows of requests, given ids and seeds; gives new requests a row; (B,), int64."""
        new = [request_id for request_id in seeds if request_id not in self._taken]
        if len(new) > len(self._free):
            self._free_ended()
        for request_id in new:
            self._taken[request_id] = self._free.pop()
            self._begins.setdefault(request_id, [(0, self._version)])
        if new:
            rows = self._tensor([self._taken[request_id] for request_id in new])
            length = self.numbers.shape[1]
            self.numbers[rows] = uniforms(self._tensor([seeds[request_id] for request_id in new]), length)
            self.log_probs[rows] = torch.nan
            # A request that was preempted and now continues.
            for request_id in self._ended.keys() & new:
                kept = self._ended.pop(request_id)
                self.log_probs[self._taken[request_id], : len(kept)] = to_device(kept, self._device)
        return self._tensor([self._taken[request_id] for request_id in seeds])

    def begin_version(self, version: int, *, mid_answer: bool) -> None:
        """Notes that tokens are drawn from other weights from now on.

        Args:
            mid_answer: whether requests are under way. Their log-probabilities are then set aside, because
                computing keys and values again overwrites them.
        """
        self._version = version
        if not mid_answer:
            return
        for name, kept in self._ended.items():
            self._begins[name].append((len(kept), version))
        wanted = {name: row for name, row in self._taken.items() if name not in self._forgotten}
        if not wanted:
            return
        table = self.log_probs[self._tensor(list(wanted.values()))].cpu()
        positions = torch.arange(1, table.shape[1] + 1).where(~table.isnan(), 0)
        for name, row, end in zip(wanted, table, positions.amax(-1).tolist(), strict=True):
            before = self._before.get(name, torch.empty(0))
            self._before[name] = torch.cat([before, row[len(before) : end]])
            self._begins[name].append((end, version))

    def versions(
        self, request_ids: Sequence[str], starts: Sequence[int], counts: Sequence[int]
    ) -> list[list[tuple[int, int]]]:
        """Returns (first token, version) for each version that drew some of the `counts` tokens."""
        told = []
        for name, start, count in zip(request_ids, starts, counts, strict=True):
            begins: dict[int, int] = {}
            for position, version in self._begins.get(name, [(0, self._version)]):
                if max(0, position - start) < count and version not in begins.values():
                    begins[max(0, position - start)] = version
            told.append(list(begins.items()))
        return told

    def knows(self, request_id: str) -> bool:
        """Returns whether the tables have log-probabilities of a request that were not taken yet."""
        return request_id in self._taken or request_id in self._ended

    def take(self, request_ids: Sequence[str], starts: Sequence[int], counts: Sequence[int]) -> Tensor:
        """Reads the log-probabilities of samples that have ended, and frees their rows."""
        values = self.read(request_ids, starts, counts)
        for name in request_ids:
            if self._ended.pop(name, None) is None:
                self._free.append(self._taken.pop(name))
            self._before.pop(name, None)
            self._begins.pop(name, None)
        return values

    def read(self, request_ids: Sequence[str], starts: Sequence[int], counts: Sequence[int]) -> Tensor:
        """Returns the log-probabilities of requests, one after the other.

        The last requested token was already copied to the host, after its log-probability was written. So on
        a GPU this does not wait for running kernels.
        """
        missing = [name for name in request_ids if not self.knows(name)]
        if missing:
            raise WeightSyncError(f"the worker has no log-probabilities of request {missing[0]}")
        spans = [slice(start, start + count) for start, count in zip(starts, counts, strict=True)]
        with torch.cuda.stream(self._stream) if self._stream else contextlib.nullcontext():
            parts = [
                self.log_probs[self._taken[name], span]
                for name, span in zip(request_ids, spans, strict=True)
                if name in self._taken
            ]
            in_rows = torch.cat(parts).cpu() if parts else torch.empty(0)
        values, filled, used = torch.full((sum(counts),), torch.nan), 0, 0
        for name, span, count in zip(request_ids, spans, counts, strict=True):
            if name in self._ended:
                kept = self._ended[name][span]
                values[filled : filled + len(kept)] = kept
            else:
                values[filled : filled + count] = in_rows[used : used + count]
                used += count
            if name in self._before:
                kept = self._before[name][span]
                values[filled : filled + len(kept)] = kept
            filled += count
        return values

    def forget(self, request_ids: Sequence[str]) -> None:
        """Drops aborted requests, which will not be fetched; the worker may not know of the abort yet."""
        for name in request_ids:
            self._ended.pop(name, None)
            self._begins.pop(name, None)
            self._before.pop(name, None)
            if name in self._taken:
                self._forgotten.add(name)

    def _free_ended(self) -> None:
        """Frees the rows of all ended requests; first copies those that will still be fetched."""
        ended = [name for name in self._taken if not self._is_running(name)]
        kept = [name for name in ended if name not in self._forgotten]
        if kept:
            copies = self.log_probs[self._tensor([self._taken[name] for name in kept])].cpu()
            for name, row in zip(kept, copies, strict=True):
                drawn = row.isnan().logical_not().nonzero()
                self._ended[name] = row[: int(drawn[-1]) + 1 if len(drawn) else 0].clone()
        self._free += [self._taken.pop(name) for name in ended]
        self._forgotten.difference_update(ended)

    def _tensor(self, numbers: Sequence[int]) -> Tensor:
        return to_device(torch.tensor(numbers, dtype=torch.int64), self._device)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copies the tensor to the device without waiting for running kernels."""
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
