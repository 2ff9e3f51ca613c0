"""Ends each response at a log-normal length drawn with the sample's seed, for `step.py --lengths mixed`.

Python imports a module of this name at startup if the folder is on PYTHONPATH. Random weights hardly ever
draw the end token, so all responses would be equally long. Only rollout servers are changed.
"""

from __future__ import annotations

import os
import random
import sys
from dataclasses import replace
from typing import Any

MEDIAN = "PACELINE_BENCHMARK_MEDIAN_LENGTH"
"""Environment variable with the median length in tokens"""

_SHORTEST = 64
_SIGMA = 0.7


def length(seed: int, median: float, longest: int) -> int:
    """Returns the length of the sample with this seed, between 64 and `longest` tokens."""
    drawn = median * random.Random(seed).lognormvariate(0.0, _SIGMA)  # noqa: S311
    return min(longest, max(_SHORTEST, round(drawn)))


def _limit_responses(median: float) -> None:
    from paceline.rollout.engines.vllm import engine

    submit = engine.submit

    async def limited(llm: Any, request: Any, **options: Any) -> Any:
        most = length(request.seed, median, request.sampling.max_tokens)
        sampling = replace(request.sampling, max_tokens=most)
        return await submit(llm, replace(request, sampling=sampling), **options)

    engine.submit = limited


if MEDIAN in os.environ and "paceline.rollout" in sys.orig_argv:
    _limit_responses(float(os.environ[MEDIAN]))
