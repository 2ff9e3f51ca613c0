"""One step's numbers out of its parts."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean

from paceline.controller.batch.barrier import Verdict
from paceline.controller.batch.dispatch import Collected, reward_components

_REJECTED = (Verdict.WRONG_VERSION, Verdict.WRONG_DIGEST, Verdict.UNKNOWN, Verdict.ABORTED)


def assemble(
    collected: Collected,
    *,
    learner: Mapping[str, float],
    push: Mapping[str, float],
    learn_s: float,
    cleanup_s: float,
    step_s: float,
) -> dict[str, float]:
    """The metrics of a training step; the seconds of phases and what none of them claims add up to `timing_s/step`."""
    num_tokens = sum(h.num_prompt_tokens + h.num_response_tokens for h in collected.batch)
    update_weights_s = push["weights/pause_ms"] / 1e3
    claimed = collected.gen_s + collected.reward_s + learn_s + update_weights_s
    metrics = {
        **learner,
        **push,
        "barrier/admitted": float(collected.verdicts[Verdict.ADMITTED]),
        "barrier/duplicates": float(collected.verdicts[Verdict.DUPLICATE]),
        "barrier/rejected": float(sum(collected.verdicts[v] for v in _REJECTED)),
        "barrier/groups_dropped": float(len(collected.dropped)),
        "barrier/wait_s": collected.wait_s,
        "timing_s/gen": collected.gen_s,
        "timing_s/reward": collected.reward_s,
        "timing_s/learn": learn_s,
        "timing_s/update_weights": update_weights_s,
        "timing_s/cleanup": cleanup_s,
        "timing_s/other": step_s - claimed,
        "timing_s/step": step_s,
        "perf/tokens_per_s": num_tokens / step_s,
        "perf/overhead_share": 1 - (collected.gen_s + collected.reward_s + learn_s) / step_s,
    }
    for name, value in reward_components(collected.batch).items():
        metrics[f"reward/{name}/mean"] = value
    if collected.num_extra is not None:
        metrics |= _dynamic_sampling(collected, collected.num_extra)
    if collected.greedy:
        metrics["reward/greedy_answers/mean"] = fmean(h.reward or 0.0 for h in collected.greedy.values())
    return metrics


def _dynamic_sampling(collected: Collected, num_extra: int) -> dict[str, float]:
    """What refilling did; `reward_mean` is over all samples, those of groups that were set aside too."""
    samples = [*collected.batch, *collected.set_aside]
    num_kept = len({header.trajectory_id.prompt_id for header in collected.batch})
    return {
        "dynamic_sampling/extra_prompts": float(num_extra),
        "dynamic_sampling/kept_share": num_kept / collected.num_groups,
        "dynamic_sampling/reward_mean": fmean(header.reward or 0.0 for header in samples),
    }


def validation(collected: Collected, *, seconds: float) -> dict[str, float]:
    """The metrics of a validation."""
    metrics = {
        "timing_s/validate": seconds,
        "val/num_prompts": float(len({h.trajectory_id.prompt_id for h in collected.batch})),
    }
    if collected.batch:
        metrics["val/reward/mean"] = fmean(h.reward or 0.0 for h in collected.batch)
        metrics["val/response_length/mean"] = fmean(h.num_response_tokens for h in collected.batch)
        for name, value in reward_components(collected.batch).items():
            metrics[f"val/{name}/mean"] = value
    metrics["val/groups_dropped"] = float(len(collected.dropped))
    return metrics
