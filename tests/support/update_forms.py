"""One training step in every form of `actor.memory`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline.learner.distributed.ranks import Ranks
from paceline.learner.train.state.learner import Learner
from support.learner_fakes import run_config
from support.learner_scenarios import numbers, take_step

GROUPS = {"adv_estimator": "grpo", "use_kl_in_reward": False, "kl_ctrl": {"type": "fixed", "kl_coef": 0.1}}
FORMS = [
    {"recompute": recompute, "keep_gathered": keep_gathered, "accumulate": accumulate}
    for recompute, keep_gathered, accumulate in (
        ("none", False, True),
        ("none", True, True),
        (0.5, False, True),
        ("full", True, True),
        ("from_host", True, True),
        ("none", False, False),
        ("full", True, False),
    )
]
FORMS.append({"recompute": "full", "keep_gathered": True, "accumulate": True, "offload": True})


def every_form(ranks: Ranks, model: str) -> list[Any]:
    """A step's metrics by form."""
    return [_step(ranks, model, memory=memory) for memory in FORMS]


def rounded_reduction(ranks: Ranks, model: str) -> list[Any]:
    """With gradients reduced in bfloat16, once and every time."""
    return [
        _step(ranks, model, reduce_dtype="bfloat16", memory={"accumulate": accumulate})
        for accumulate in (True, False)
    ]


def offloaded_reference(ranks: Ranks, model: str) -> list[Any]:
    """With the KL to a reference in the loss, which is on the device or in host memory."""
    return [
        _step(ranks, model, use_kl_loss=True, memory={"offload_reference": offload})
        for offload in (False, True)
    ]


def _step(ranks: Ranks, model: str, **actor: Any) -> dict[str, float]:
    settings = {"ppo_max_token_len_per_gpu": 96, "ratio_audit_freq": 1, **actor}
    learner = Learner.build(run_config(Path(model), algorithm=GROUPS, actor=settings), ranks)
    return numbers(take_step(learner, 1))


def everything(ranks: Ranks, model: str) -> list[Any]:
    """All of this on one group."""
    from support.memory_faults import one_rank_runs_out_with_gathered_weights

    return [
        every_form(ranks, model),
        rounded_reduction(ranks, model),
        one_rank_runs_out_with_gathered_weights(ranks, model),
        offloaded_reference(ranks, model),
    ]
