"""Metrics by origin of prompts: the share and the mean reward of each training set and data source."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean

from paceline.controller.batch.inputs import Inputs, source_name
from paceline.core.samples.trajectory import ScoredHeader
from paceline.data.prompts import Prompt


def of_origins(
    samples: Sequence[ScoredHeader], prompts: Mapping[int, Prompt], inputs: Inputs
) -> dict[str, float]:
    """Returns the metrics of a batch's samples, by the sets and sources of their prompts."""
    origins: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    origins |= {f"train/{name}": defaultdict(list) for name in inputs.cursor.names if name}
    for header in samples:
        prompt_id = header.trajectory_id.prompt_id
        if named := inputs.cursor.set_of(prompt_id):
            origins[f"train/{named}"][prompt_id].append(header.reward or 0.0)
        source = source_name(prompts[prompt_id].context.data_source)
        if source in inputs.sources:
            origins[f"train/source/{source}"][prompt_id].append(header.reward or 0.0)
    num_prompts = len({header.trajectory_id.prompt_id for header in samples})
    metrics = {}
    for origin, groups in sorted(origins.items()):
        metrics[f"{origin}/share"] = len(groups) / max(1, num_prompts)
        if groups:
            rewards = [reward for group in groups.values() for reward in group]
            metrics[f"{origin}/reward/mean"] = fmean(rewards)
    return metrics
