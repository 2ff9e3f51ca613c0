"""Draws in SGLang by seed and position, and returns the log-probabilities of the drawn tokens.

SGLang's own sampler honours seeds only in its deterministic mode, and draws otherwise when a request with
top-p is in the same batch. Registered as a sampling backend, this one draws all rows in the same way.
"""

from __future__ import annotations

import functools
from typing import Any, Final

import torch
from torch import Tensor

from paceline.rollout.engines.sampling.draw import draw, truncated, uniforms_at

BACKEND: Final = "paceline"
GREEDY: Final = 0.0
"""Temperature of greedy rows; SGLang itself would replace it by 1 and top_k=1."""


def install() -> None:
    """Registers the backend, and passes seeds on to the sampler in SGLang's other modes, too.

    Call it before the model is loaded.
    """
    from sglang.srt.layers.sampler import Sampler, register_sampler_backend
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

    class SeededSampler(Sampler):  # type: ignore[misc]
        """Draws by seed and position."""

        def forward(
            self,
            logits_output: Any,
            sampling_info: Any,
            return_logprob: bool,
            top_logprobs_nums: list[int],
            token_ids_logprobs: list[Any],
            positions: Tensor,
        ) -> Tensor:
            logits = self._preprocess_logits(logits_output.next_token_logits, sampling_info)
            tokens, log_probs = drawn(logits, sampling_info, positions)
            if return_logprob:
                logits_output.next_token_logprobs = log_probs
            tokens = tokens.to(torch.int32)
            self._sync_token_ids_across_tp(tokens, sampling_info)
            return tokens

    register_sampler_backend(BACKEND, SeededSampler)
    collect = SamplingBatchInfo.from_schedule_batch.__func__

    @functools.wraps(collect)
    def with_seeds(cls: Any, batch: Any, vocab_size: int) -> Any:
        info = collect(cls, batch, vocab_size)
        seeds = [request.sampling_params.sampling_seed or 0 for request in batch.reqs]
        info.sampling_seed = torch.tensor(seeds, dtype=torch.int64).to(batch.device, non_blocking=True)
        return info

    SamplingBatchInfo.from_schedule_batch = classmethod(with_seeds)


def drawn(logits: Tensor, info: Any, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Returns a token per row and its log-probability in the distribution that it was drawn from; (B,) both.

    Args:
        logits: (B, V).
        info: SGLang's SamplingBatchInfo: `temperatures` (B, 1), of which `GREEDY` means the likeliest token,
            `sampling_seed` (B,), `top_ps` and `top_ks` (B,).
        positions: (B,), the positions of the tokens that precede the drawn ones.
    """
    temperatures = info.temperatures.view(-1)
    is_greedy = temperatures == GREEDY
    divisors = torch.where(is_greedy, 1.0, temperatures)
    numbers = uniforms_at(info.sampling_seed, positions.long() + 1)
    if logits.is_cuda and not (info.need_top_p_sampling or info.need_top_k_sampling):
        from paceline.rollout.engines.sampling.draw_kernels import draw_into

        rows = torch.arange(len(logits), device=logits.device)
        log_probs = torch.empty(len(logits), 1, dtype=torch.float32, device=logits.device)
        tokens = draw_into(
            logits,
            torch.zeros_like(rows),
            table_rows=rows,
            divisors=divisors,
            is_greedy=is_greedy.to(torch.uint8),
            numbers=numbers.unsqueeze(-1),
            log_probs=log_probs,
            dtype=torch.int64,
        )
        return tokens.view(-1), log_probs.view(-1)
    values = (logits.float() / divisors.unsqueeze(-1)).log_softmax(-1)
    if info.need_top_p_sampling or info.need_top_k_sampling:
        top_k = torch.where(info.top_ks > values.shape[-1], 0, info.top_ks).long()
        values = truncated(values, info.top_ps, top_k)
    tokens = torch.where(is_greedy, values.argmax(-1), draw(values, numbers))
    return tokens, values.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
