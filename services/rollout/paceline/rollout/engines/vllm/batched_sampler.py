"""Takes the place of vLLM's sampler in a worker (`rollout.sampler: batched`).

vLLM's own draws row by row where requests have seeds, and hands a log-probability per token through two
processes. Here a batch is drawn at once, and log-probabilities stay in the worker until their sample ends.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from paceline.core.errors import ModelError, WeightSyncError
from paceline.rollout.engines.vllm.draw import draw, uniforms
from paceline.rollout.engines.vllm.samples import SEED

# Rows for running requests, and as many for samples that have ended and wait to be fetched.
_ROWS_PER_SEQUENCE: Final = 2


class Places:
    """Tables with a row per request: the numbers that its tokens are drawn by, and its log-probabilities.

    When rows run out, those of requests that have ended are copied to the host until they are fetched.

    Args:
        num_rows: more than requests run at a time.
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
        self._device = device
        self._stream: Any = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def rows_of(self, seeds: dict[str, int]) -> Tensor:
        """The rows of requests, by their ids and seeds; those that are new get one; (B,), int64."""
        new = [request_id for request_id in seeds if request_id not in self._taken]
        if len(new) > len(self._free):
            self._free_ended()
        for request_id in new:
            self._taken[request_id] = self._free.pop()
        if new:
            rows = self._tensor([self._taken[request_id] for request_id in new])
            length = self.numbers.shape[1]
            self.numbers[rows] = uniforms(self._tensor([seeds[request_id] for request_id in new]), length)
            self.log_probs[rows] = torch.nan
        return self._tensor([self._taken[request_id] for request_id in seeds])

    def take(self, request_ids: Sequence[str], starts: Sequence[int], counts: Sequence[int]) -> Tensor:
        """The log-probabilities of samples that have ended, one after the other; frees their rows.

        A sample's last token has been copied to the host already, and its log-probability was written
        before that. So on a GPU this waits for nothing that is running.
        """
        missing = [name for name in request_ids if name not in self._taken and name not in self._ended]
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
                kept = self._ended.pop(name)[span]
                values[filled : filled + len(kept)] = kept
            else:
                values[filled : filled + count] = in_rows[used : used + count]
                used += count
                self._free.append(self._taken.pop(name))
            filled += count
        return values

    def forget(self, request_ids: Sequence[str]) -> None:
        """Nobody fetches these: they were aborted. The worker may not have heard of it yet."""
        for name in request_ids:
            self._ended.pop(name, None)
            if name in self._taken:
                self._forgotten.add(name)

    def _free_ended(self) -> None:
        """Frees the rows of all requests that have ended, after a copy of those that are still fetched."""
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
    """The tensor on the device, without waiting for what runs there."""
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


class BatchedSampler:
    """Draws a batch's tokens and writes down their log-probabilities.

    Args:
        runner: vLLM's model runner, whose sampler this replaces.

    Raises:
        ModelError: the runner has another kind of sampler.
    """

    def __init__(self, runner: Any) -> None:
        from vllm.v1.outputs import SamplerOutput
        from vllm.v1.sample.sampler import Sampler

        if not isinstance(runner.sampler, Sampler):
            raise ModelError(
                f"rollout.sampler: batched does not know vLLM's {type(runner.sampler).__module__}; write "
                "rollout.sampler: engine"
            )
        self._runner, self._engines, self._make_output = runner, runner.sampler, SamplerOutput
        self._places = Places(
            _ROWS_PER_SEQUENCE * runner.max_num_reqs,
            runner.max_model_len + 1,
            runner.device,
            lambda request_id: request_id in runner.requests,
        )
        self._ids: list[str] = []
        self._rows = torch.empty(0, dtype=torch.int64)
        self._greedy: Tensor | None = None
        self._temperatures: Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engines, name)

    def __call__(self, logits: Tensor, sampling_metadata: Any, *args: Any, **kwargs: Any) -> Any:
        """A token per row, as vLLM's sampler gives them, without log-probabilities."""
        ids = self._runner.input_batch.req_ids
        if ids != self._ids and not self._changed(ids):
            return self._engines(logits, sampling_metadata, *args, **kwargs)
        logits = logits.float()
        if self._temperatures is not None:
            logits = logits / self._temperatures
        log_probs = logits.log_softmax(-1)
        # A token's position is the number of tokens before it.
        positions = self._runner.seq_lens[: len(ids)].long()
        tokens = draw(log_probs, self._places.numbers[self._rows, positions])
        if self._greedy is not None:
            tokens = torch.where(self._greedy, log_probs.argmax(-1), tokens)
        drawn = log_probs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
        self._places.log_probs[self._rows, positions] = drawn
        return self._make_output(
            sampled_token_ids=tokens.to(torch.int32).unsqueeze(-1), logprobs_tensors=None
        )

    def take(self, request_ids: Sequence[str], starts: Sequence[int], counts: Sequence[int]) -> Tensor:
        """See `Places.take`."""
        return self._places.take(request_ids, starts, counts)

    def forget(self, request_ids: Sequence[str]) -> None:
        """See `Places.forget`."""
        self._places.forget(request_ids)

    def _changed(self, ids: Sequence[str]) -> bool:
        """Takes over the requests of another batch; false if one of them has no seed of ours."""
        params = [self._runner.requests[request_id].sampling_params for request_id in ids]
        seeds: list[Any] = [(given.extra_args or {}).get(SEED) for given in params]
        if None in seeds:
            self._ids = []
            return False
        self._rows = self._places.rows_of(dict(zip(ids, seeds, strict=True)))
        temperatures = [given.temperature for given in params]
        device = self._rows.device
        self._greedy = self._temperatures = None
        if not all(temperatures):
            self._greedy = to_device(torch.tensor([not value for value in temperatures]), device)
        if any(value not in (0.0, 1.0) for value in temperatures):
            divisors = [[value or 1.0] for value in temperatures]
            self._temperatures = to_device(torch.tensor(divisors, dtype=torch.float32), device)
        self._ids = list(ids)
        return True
