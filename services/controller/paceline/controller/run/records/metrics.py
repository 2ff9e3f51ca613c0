"""The metrics of a step and of a validation, and the file that they go to."""

from __future__ import annotations

import json
import math
import os
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from statistics import fmean, pstdev

from paceline.controller.batch.barrier import Verdict
from paceline.controller.batch.collected_batch import (
    Batch,
    reward_components,
    share_without_spread,
    values_of_components,
)
from paceline.controller.verify.digests import digest_of
from paceline.core.policy import token_ages
from paceline.core.run_record.step_metrics import TIME
from paceline.core.samples.trajectory import ScoredHeader
from paceline.service.disk import writing
from paceline.service.process import write_atomically

_REJECTED = (Verdict.WRONG_VERSION, Verdict.WRONG_DIGEST, Verdict.UNKNOWN, Verdict.ABORTED)


def assemble(
    batch: Batch,
    *,
    learner: Mapping[str, float],
    push: Mapping[str, float],
    learn_s: float,
    cleanup_s: float,
    step_s: float,
) -> dict[str, float]:
    """Returns the metrics of a training step.

    The seconds of the phases and `timing_s/other`, the rest, add up to `timing_s/step`.
    """
    update_weights_s = push["weights/pause_ms"] / 1e3
    claimed = batch.gen_s + batch.reward_s + learn_s + update_weights_s
    metrics = {
        **learner,
        **push,
        "barrier/admitted": float(batch.verdicts[Verdict.ADMITTED]),
        "barrier/duplicates": float(batch.verdicts[Verdict.DUPLICATE]),
        "barrier/rejected": float(sum(batch.verdicts[v] for v in _REJECTED)),
        "barrier/groups_dropped": float(len(batch.dropped)),
        "barrier/wait_s": batch.wait_s,
        "timing_s/gen": batch.gen_s,
        "timing_s/reward": batch.reward_s,
        "timing_s/learn": learn_s,
        "timing_s/update_weights": update_weights_s,
        "timing_s/cleanup": cleanup_s,
        "timing_s/other": step_s - claimed,
        "timing_s/step": step_s,
        "perf/tokens_per_s": batch.num_tokens / step_s,
        "perf/overhead_share": 1 - (batch.gen_s + batch.reward_s + learn_s) / step_s,
        **_spread(batch),
        **episode_metrics(batch.samples),
    }
    for reason, count in Counter(group.reason for group in batch.dropped).items():
        metrics[f"barrier/groups_dropped/{reason.replace(':', '_')}"] = float(count)
    for name, value in reward_components(batch.samples).items():
        metrics[f"reward/{name}/mean"] = value
    if num_gpus := push["perf/num_gpus"]:
        metrics["perf/tokens_per_s_per_gpu"] = batch.num_tokens / step_s / num_gpus
    metrics |= _component_spread(batch.samples) | _scoring_times(batch.samples)
    if batch.num_extra is not None:
        metrics |= _dynamic_sampling(batch, batch.num_extra)
    if batch.greedy:
        metrics["reward/greedy_answers/mean"] = fmean(h.reward or 0.0 for h in batch.greedy.values())
    return metrics


def of_ages(samples: Sequence[ScoredHeader], step: int) -> dict[str, float]:
    """Returns metrics of the ages of a step's tokens, for runs with a bound on them."""
    mean, oldest = token_ages((part for header in samples for part in header.policy_ranges), step)
    return {"barrier/staleness/mean": mean, "barrier/staleness/max": oldest}


def _spread(batch: Batch) -> dict[str, float]:
    """Returns how much the rewards differ, over the batch and within its groups."""
    rewards = [header.reward or 0.0 for header in batch.samples]
    if not rewards:
        return {}
    metrics = {"reward/std": pstdev(rewards), "reward/min": min(rewards), "reward/max": max(rewards)}
    without = share_without_spread(batch.samples)
    return metrics if without is None else metrics | {"groups/without_spread": without}


def _component_spread(samples: Sequence[ScoredHeader]) -> dict[str, float]:
    """Returns each component's spread, and the shares of samples at either end of its values."""
    metrics = {}
    for name, of_component in values_of_components(samples).items():
        if "/" in name:
            continue
        lowest, highest, count = min(of_component), max(of_component), len(of_component)
        metrics[f"reward/{name}/std"] = pstdev(of_component)
        metrics[f"reward/{name}/lowest_share"] = of_component.count(lowest) / count
        metrics[f"reward/{name}/highest_share"] = of_component.count(highest) / count
    return metrics


def _scoring_times(samples: Sequence[ScoredHeader]) -> dict[str, float]:
    """Returns the seconds from a trajectory's arrival at a reward service to its score."""
    if not samples:
        return {}
    seconds = sorted(header.reward_s for header in samples)
    last = len(seconds) - 1
    return {
        "timing_s/score_p50": seconds[round(0.5 * last)],
        "timing_s/score_p99": seconds[round(0.99 * last)],
    }


def episode_metrics(samples: Sequence[ScoredHeader]) -> dict[str, float]:
    """Returns turns, tool calls and stop reasons of episodes; empty if all samples were single answers."""
    episodes = [header.episode for header in samples if header.episode is not None]
    if not episodes:
        return {}
    metrics = {
        "episode/turns/mean": fmean(episode.num_turns for episode in episodes),
        "episode/turns/max": float(max(episode.num_turns for episode in episodes)),
        "episode/tool_calls/mean": fmean(episode.num_tool_calls for episode in episodes),
        "episode/tool_s/mean": fmean(episode.tool_s for episode in episodes),
    }
    for reason, count in Counter(episode.stop_reason for episode in episodes).items():
        metrics[f"episode/stop/{reason}"] = count / len(episodes)
    return metrics


def _dynamic_sampling(batch: Batch, num_extra: int) -> dict[str, float]:
    """Returns the effect of refilling; `reward_mean` includes the samples of groups that were set aside."""
    samples = [*batch.samples, *batch.set_aside]
    num_kept = len({header.trajectory_id.prompt_id for header in batch.samples})
    return {
        "dynamic_sampling/extra_prompts": float(num_extra),
        "dynamic_sampling/kept_share": num_kept / batch.num_groups,
        "dynamic_sampling/reward_mean": fmean(header.reward or 0.0 for header in samples),
    }


class MetricsFile:
    """One JSON line per step, keys in a fixed order, so that two runs can be compared line by line.

    A validation beside training has a line of its own, the second one of its step.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def cut(self, last_step: int, validated: Collection[int] = ()) -> None:
        """Drops the lines of later steps, which are unfinished or void, and those of some validations.

        Args:
            validated: the steps whose validation beside training is repeated.
        """
        text = self._path.read_text(encoding="utf-8") if self._path.exists() else ""
        lines, kept, seen = text.splitlines(keepends=True), list[str](), set[int]()
        for line in (line for line in lines if line.endswith("\n")):
            step = int(json.loads(line)["step"])
            if step <= last_step and not (step in seen and step in validated):
                kept.append(line)
            seen.add(step)
        if kept == lines and self._path.exists():
            return
        write_atomically(self._path, "".join(kept))

    def append(self, step: int, metrics: Mapping[str, float]) -> str:
        """Writes a step's line, with the time, to the disk; a value that is not finite becomes null.

        Returns:
            The digest of the line.
        """
        row: dict[str, float | int | None] = {"step": step, TIME: round(time.time(), 3)}
        row |= {key: (value if math.isfinite(value) else None) for key, value in sorted(metrics.items())}
        line = json.dumps(row)
        with writing(self._path.parent), self._path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
            file.flush()
            os.fsync(file.fileno())
        return digest_of(line.encode())
