"""The tokens that a served teacher finds likeliest at each token of a response (`algorithm.teacher`)."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.core.samples.trajectory import Float32Array, Int32Array

TOP_K_BYTES = 8
"""Bytes of a token id and its log-prob."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TeacherTopK:
    """The teacher's K likeliest tokens at each of R response tokens, the likeliest first.

    Tokens that the policy did not sample have zeros in both arrays.

    Attributes:
        token_ids: (R, K); the K of a token are distinct.
        log_probs: (R, K), in nats at temperature 1.
    """

    token_ids: Int32Array
    log_probs: Float32Array
