"""One training step in every form of `actor.memory`."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

from paceline.learner.distributed.ranks import Ranks
from paceline.learner.train.learner import Learner
from support.learner_fakes import run_config
from support.learner_scenarios import numbers, take_step

GROUPS = {"adv_estimator": "grpo", "use_kl_in_reward": False, "kl_ctrl": {"type": "fixed", "kl_coef": 0.1}}
FORMS = [
    {"recompute": recompute, "keep_gathered": keep_gathered, "accumulate": accumulate}
    for accumulate, recompute, keep_gathered in product((True, False), ("none", 0.5, "full"), (False, True))
]


def every_form(ranks: Ranks, model: str) -> list[Any]:
    """By form: metrics of two steps, and the gradient norms of their optimizer steps."""
    return [_steps(ranks, model, memory=memory) for memory in FORMS]


def rounded_reduction(ranks: Ranks, model: str) -> list[Any]:
    """With gradients reduced in float32 and bfloat16, once and every time."""
    return [
        _steps(ranks, model, reduce_dtype=dtype, memory={"accumulate": accumulate})
        for dtype in ("float32", "bfloat16")
        for accumulate in (True, False)
    ]


def _steps(ranks: Ranks, model: str, **actor: Any) -> list[dict[str, float]]:
    settings = {"ppo_max_token_len_per_gpu": 48, "ratio_audit_freq": 1, **actor}
    learner = Learner.build(run_config(Path(model), algorithm=GROUPS, actor=settings), ranks)
    return [numbers(take_step(learner, step)) for step in (1, 2)]


def everything(ranks: Ranks, model: str) -> list[Any]:
    """All of this on one group."""
    from support.memory_faults import one_rank_runs_out_in_every_form

    return [
        every_form(ranks, model),
        rounded_reduction(ranks, model),
        one_rank_runs_out_in_every_form(ranks, model),
    ]
