"""Replaces vLLM's sampler in a worker (`rollout.sampler: batched`).

vLLM's own sampler passes a log-probability per token through two processes, and with its first model runner
it draws row by row if requests have seeds. This one draws a batch at once, and keeps log-probabilities in the
worker until their sample ends.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from paceline.core.errors import ModelError
from paceline.rollout.engines.sampling.draw import draw, truncated
from paceline.rollout.engines.vllm.sampling.places import Places, to_device
from paceline.rollout.engines.vllm.sampling.samples import SEED

# Rows for running requests, and as many for ended samples that wait to be fetched.
_ROWS_PER_SEQUENCE: Final = 2


def replace_sampler(runner: Any) -> BatchedSampler:
    """Puts a batched sampler into one of vLLM's two model runners.

    Raises:
        ModelError: the runner has another kind of sampler.
    """
    from vllm.v1.sample.sampler import Sampler

    kind: type[BatchedSampler] | None = FirstRunnersSampler if isinstance(runner.sampler, Sampler) else None
    if kind is None and _is_second(runner.sampler):
        kind = SecondRunnersSampler
    if kind is None:
        raise ModelError(
            f"rollout.sampler: batched does not know vLLM's {type(runner.sampler).__module__}; write "
            "rollout.sampler: engine"
        )
    sampler = kind(runner)
    runner.sampler = sampler
    return sampler


def _is_second(sampler: Any) -> bool:
    try:  # needs triton
        from vllm.v1.worker.gpu.sample.sampler import Sampler
    except ImportError:
        return False
    return isinstance(sampler, Sampler)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """Data that stays the same from token to token of a batch.

    Attributes:
        ids: ids of the requests, in the order of the logits.
        table_rows: (B,), int64: the requests' rows in the tables.
        divisors: (B,), float32: temperatures, and 1 for greedy rows.
        is_greedy: (B,), uint8.
        truncation: (B,) top_p and (B,) top_k; None if every row draws from all tokens.
    """

    ids: list[str]
    table_rows: Tensor
    divisors: Tensor
    is_greedy: Tensor
    truncation: tuple[Tensor, Tensor] | None


class BatchedSampler(abc.ABC):
    """Draws a batch's tokens and records their log-probabilities.

    Args:
        runner: vLLM's model runner, whose sampler this replaces.

    Attributes:
        places: the random numbers and log-probabilities of the requests.
    """

    def __init__(self, runner: Any) -> None:
        self._runner, self._engines = runner, runner.sampler
        self.places = Places(
            _ROWS_PER_SEQUENCE * runner.max_num_reqs,
            runner.max_model_len + 1,
            runner.device,
            self._is_running,
        )
        self._rows: Rows | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engines, name)

    @abc.abstractmethod
    def _is_running(self, request_id: str) -> bool:
        """Returns whether the runner still knows a request."""

    @abc.abstractmethod
    def _sampling_params(self, request_id: str) -> Any:
        """Returns vLLM's parameters of a request; None if it is unknown."""

    def _rows_of(self, ids: list[str]) -> Rows | None:
        """Returns the rows of a batch; None if one of its requests has no seed of Paceline."""
        if self._rows is not None and self._rows.ids == ids:
            return self._rows
        self._rows = None
        params = [self._sampling_params(request_id) for request_id in ids]
        seeds: list[Any] = [
            (given.extra_args or {}).get(SEED) if given is not None else None for given in params
        ]
        if None not in seeds:
            rows = self.places.rows_of(dict(zip(ids, seeds, strict=True)))
            divisors = torch.tensor([given.temperature or 1.0 for given in params], dtype=torch.float32)
            greedy = torch.tensor([not given.temperature for given in params], dtype=torch.uint8)
            self._rows = Rows(
                ids=list(ids),
                table_rows=rows,
                divisors=to_device(divisors, rows.device),
                is_greedy=to_device(greedy, rows.device),
                truncation=_truncation(params, rows.device),
            )
        return self._rows

    def _draw(self, logits: Tensor, rows: Rows, positions: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns a token per row, (B, 1); records its log-probability in the tables.

        Args:
            positions: (B,): the number of tokens before each token.
        """
        numbers, log_probs = self.places.numbers, self.places.log_probs
        # Only validation draws from a part of the tokens, so the kernels do not support it.
        if logits.is_cuda and rows.truncation is None:
            from paceline.rollout.engines.sampling.draw_kernels import draw_into

            return draw_into(
                logits,
                positions,
                table_rows=rows.table_rows,
                divisors=rows.divisors,
                is_greedy=rows.is_greedy,
                numbers=numbers,
                log_probs=log_probs,
                dtype=dtype,
            )
        values = (logits.float() / rows.divisors.unsqueeze(-1)).log_softmax(-1)
        if rows.truncation is not None:
            values = truncated(values, *rows.truncation)
        tokens = draw(values, numbers[rows.table_rows, positions])
        tokens = torch.where(rows.is_greedy.bool(), values.argmax(-1), tokens).unsqueeze(-1)
        log_probs[rows.table_rows, positions] = values.gather(-1, tokens).squeeze(-1)
        return tokens.to(dtype)


def _truncation(params: Sequence[Any], device: torch.device) -> tuple[Tensor, Tensor] | None:
    """Returns top_p and top_k of a batch's requests; None if they leave no token out."""
    # A top_k of 0 or -1 means all tokens in vLLM.
    if all(given.top_p == 1 and given.top_k <= 0 for given in params):
        return None
    top_p = torch.tensor([given.top_p for given in params], dtype=torch.float32)
    top_k = torch.tensor([max(0, given.top_k) for given in params], dtype=torch.int64)
    return to_device(top_p, device), to_device(top_k, device)


class FirstRunnersSampler(BatchedSampler):
    """Serves vLLM's `v1.worker.gpu_model_runner`, and its runner for CPUs."""

    def __call__(self, logits: Tensor, sampling_metadata: Any, *args: Any, **kwargs: Any) -> Any:
        """Returns a token per row in the form of vLLM's sampler, without log-probabilities."""
        from vllm.v1.outputs import SamplerOutput

        rows = self._rows_of(self._runner.input_batch.req_ids)
        if rows is None:
            return self._engines(logits, sampling_metadata, *args, **kwargs)
        positions = self._runner.seq_lens[: len(rows.ids)].long()
        tokens = self._draw(logits, rows, positions, torch.int32)
        return SamplerOutput(sampled_token_ids=tokens, logprobs_tensors=None)

    def _is_running(self, request_id: str) -> bool:
        return request_id in self._runner.requests

    def _sampling_params(self, request_id: str) -> Any:
        return self._runner.requests[request_id].sampling_params


class SecondRunnersSampler(BatchedSampler):
    """Serves vLLM's `v1.worker.gpu.model_runner`, which vLLM uses for some architectures.

    That runner forgets preempted requests and adds them again.
    """

    def __init__(self, runner: Any) -> None:
        super().__init__(runner)
        self._params: dict[int, Any] = {}

    def add_request(self, req_idx: int, prompt_len: int, sampling_params: Any) -> None:
        """Overrides vLLM's method and remembers the parameters."""
        self._params[req_idx] = sampling_params
        self._engines.add_request(req_idx, prompt_len, sampling_params)

    def __call__(self, logits: Tensor, input_batch: Any) -> Any:
        """Returns a token per row in the form of vLLM's sampler, without log-probabilities."""
        from vllm.v1.worker.gpu.input_batch import get_num_sampled_and_rejected
        from vllm.v1.worker.gpu.sample.output import SamplerOutput

        rows = self._rows_of(input_batch.req_ids)
        if rows is None or len(logits) != len(rows.ids):
            return self._engines(logits, input_batch)
        positions = input_batch.seq_lens[: len(rows.ids)]
        tokens = self._draw(logits, rows, positions, torch.int64)
        num_sampled, num_rejected = get_num_sampled_and_rejected(
            input_batch.seq_lens.new_ones(len(rows.ids)),
            input_batch.seq_lens,
            input_batch.cu_num_logits,
            input_batch.idx_mapping,
            self._engines.req_states.prefill_len.gpu,
        )
        return SamplerOutput(
            sampled_token_ids=tokens,
            logprobs_tensors=None,
            num_nans=None,
            num_sampled=num_sampled,
            num_rejected=num_rejected,
        )

    def _is_running(self, request_id: str) -> bool:
        return request_id in self._runner.req_states.req_id_to_index

    def _sampling_params(self, request_id: str) -> Any:
        index = self._runner.req_states.req_id_to_index.get(request_id)
        return self._params.get(index)
