"""Reduces per-token losses to the scalar that is differentiated."""

from __future__ import annotations

from torch import Tensor

from paceline.algorithms.checks import require_same_shape
from paceline.algorithms.statistics import EPS, keep
from paceline.core.errors import ConfigError, NumericsError

TOKEN_MEAN = "token-mean"
SEQ_MEAN_TOKEN_SUM = "seq-mean-token-sum"
SEQ_MEAN_TOKEN_MEAN = "seq-mean-token-mean"
SEQ_MEAN_TOKEN_SUM_NORM = "seq-mean-token-sum-norm"
MODES = (TOKEN_MEAN, SEQ_MEAN_TOKEN_SUM, SEQ_MEAN_TOKEN_MEAN, SEQ_MEAN_TOKEN_SUM_NORM)

Count = int | float | Tensor


def aggregate(
    loss: Tensor,
    mask: Tensor,
    mode: str,
    *,
    num_tokens: Count | None = None,
    num_sequences: Count | None = None,
    constant: float | None = None,
) -> Tensor:
    """Reduces per-token losses to a scalar.

    ==========================  ==========================================================================
    token-mean                  sum(loss) / num_tokens  (DAPO, arXiv:2503.14476, eq. 8)
    seq-mean-token-sum          sum over sequences of their token sums / num_sequences
    seq-mean-token-mean         sum over sequences of their token means / num_sequences
                                (GRPO, arXiv:2402.03300, eq. 3)
    seq-mean-token-sum-norm     seq-mean-token-sum / constant  (Dr. GRPO, arXiv:2503.20783)
    ==========================  ==========================================================================

    Args:
        loss: (B, T) per-token losses, one sequence per row.
        mask: (B, T), 1 on the tokens that count.
        mode: one of the names above.
        num_tokens: unmasked tokens of the mini-batch over all ranks; None: those of `mask`.
        num_sequences: the mini-batch's sequences with an unmasked token, over all ranks; None: those of
            `mask`.
        constant: the divisor of seq-mean-token-sum-norm, usually the longest response allowed. None: T, which
            makes the result depend on padding.

    Returns:
        0-dim, in the precision of the loss (float32 for half types). If the denominator is passed, a part
        without tokens gives 0.

    Raises:
        ConfigError: unknown mode, or a constant that is not above 0.
        NumericsError: nothing is unmasked and no denominator is passed, or shapes differ.
    """
    require_same_shape(loss=loss, mask=mask)
    if mode not in MODES:
        raise ConfigError(f"loss_agg_mode {mode!r} is not known; choose one of {', '.join(MODES)}")
    if constant is not None and not constant > 0:
        raise ConfigError(f"the constant of {SEQ_MEAN_TOKEN_SUM_NORM} is {constant}; it must be above 0")
    kept = keep(loss, mask)
    if mode == TOKEN_MEAN:
        return kept.sum() / _denominator(num_tokens, mask.bool().sum(), "num_tokens")
    per_sequence = kept.sum(-1)
    lengths = mask.bool().sum(-1)
    if mode == SEQ_MEAN_TOKEN_MEAN:
        per_sequence = per_sequence / (lengths + EPS)
    result = per_sequence.sum() / _denominator(num_sequences, (lengths > 0).sum(), "num_sequences")
    if mode == SEQ_MEAN_TOKEN_SUM_NORM:
        result = result / (mask.shape[-1] if constant is None else constant)
    return result


def _denominator(given: Count | None, counted: Tensor, name: str) -> Count:
    if given is None:
        if not bool(counted > 0):
            raise NumericsError(
                f"all tokens are masked: there is no loss to average; pass {name} of the whole mini-batch "
                "if this is a part of one"
            )
        return counted
    # A count on the device is not checked: that would wait for the device on every micro-batch.
    if not isinstance(given, Tensor) and not given > 0:
        raise NumericsError(f"{name} is {given}: the mini-batch has nothing to train on")
    return given
