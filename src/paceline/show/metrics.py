"""The table of metrics that the report, the live view and the summary show."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

REWARD = "Reward"
PHASES = "Seconds per phase"

TRAIN_REWARD = "critic/score/mean"
VAL_REWARD = "val/reward/mean"
_MEAN_OF = 5
STEP_SECONDS = "timing_s/step"
TOKENS_PER_S = "perf/tokens_per_s"
MFU = "perf/mfu"

_VAL_REWARD = re.compile(r"val/(?:(?P<set>[^/]+)/)?reward/mean")


def val_rewards(names: Iterable[str]) -> dict[str, str]:
    """Returns the names of validation rewards among `names`, by set; "" is the set of data.val_files."""
    matches = filter(None, map(_VAL_REWARD.fullmatch, names))
    return dict(sorted((match["set"] or "", match[0]) for match in matches))


def headlines(names: Iterable[str]) -> dict[str, str]:
    """Returns the metrics compared before and after a run (on the page and in the closing lines), by title.

    Args:
        names: names of the metrics that a run has.
    """
    of_sets = val_rewards(names)
    titles = {f"Validation reward{f' ({of})' if of else ''}": name for of, name in of_sets.items()}
    return {**titles, "Training reward": TRAIN_REWARD}


def before_and_after(name: str, values: Sequence[float]) -> tuple[float, float, int]:
    """Returns the numbers that a headline compares: the means of the first and of the last values, and the
    number of values in each mean.

    A validation counts with one value; the training's reward with up to five, because single batches differ
    by chance.

    Args:
        values: the metric's values by step; at least one.
    """
    count = max(1, min(_MEAN_OF, len(values) // 2)) if name == TRAIN_REWARD else 1
    return fmean(values[:count]), fmean(values[-count:]), count


@dataclass(frozen=True, slots=True)
class ShownMetric:
    """A metric of metrics.jsonl and where it is shown. Metrics with the same chart or column share it.

    Attributes:
        name: its key in metrics.jsonl.
        chart: title of its chart on the report; "" for none.
        label: its line's name in that chart.
        dots: marks every point of the line, for a metric that only some steps have.
        column: its column in the live view; "" for none.
        unit: what follows the number in the column.
    """

    name: str
    chart: str = ""
    label: str = ""
    dots: bool = False
    column: str = ""
    format: str = ".3f"
    unit: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """A column of the live view. A step shows the first of `metrics` that it has."""

    title: str
    metrics: tuple[ShownMetric, ...]

    @property
    def unit(self) -> str:
        """The unit of its numbers; "" for none."""
        return self.metrics[0].unit

    def cell(self, values: Mapping[str, float]) -> str:
        """Returns the number of a step, formatted; "" if the step has none of the column's metrics."""
        return next((f"{values[m.name]:{m.format}}" for m in self.metrics if m.name in values), "")


# Charts of the members' machines, by kind of measurement.
_MACHINES = {
    "gpu_utilisation": "GPU utilisation",
    "gpu_memory_gib": "GPU memory in use",
    "cpu_cores": "CPU cores in use",
    "resident_gib": "Memory of processes",
}

# Charts and columns come in the order of their first line here; so do the lines of a chart.
METRICS: tuple[ShownMetric, ...] = (
    ShownMetric(TRAIN_REWARD, REWARD, "training", column="reward"),
    ShownMetric(VAL_REWARD, REWARD, "validation", dots=True, column="val"),
    ShownMetric("dynamic_sampling/reward_mean", REWARD, "all samples, groups set aside too"),
    ShownMetric("reward/std", "Spread of rewards", "standard deviation"),
    ShownMetric("groups/without_spread", "Groups without spread", "share"),
    # The column KL shows the KL to the reference if the run measures it, else the KL of the update.
    ShownMetric("algorithm/reference_kl", "KL", "to the reference", column="KL", format=".4f"),
    ShownMetric("actor/kl_loss", "KL", "KL loss", column="KL", format=".4f"),
    ShownMetric("actor/ppo_kl", "KL", "old to new policy", column="KL", format=".4f"),
    ShownMetric("actor/ppo_kl_max", "KL", "old to new, worst mini-batch"),
    ShownMetric("algorithm/kl_coef", "KL coefficient", "coefficient"),
    ShownMetric("actor/pg_clipfrac", "Clip fractions", "policy", column="clip"),
    ShownMetric("actor/pg_clipfrac_lower", "Clip fractions", "dual clip"),
    ShownMetric("critic/vf_clipfrac", "Clip fractions", "value"),
    ShownMetric("actor/entropy", "Entropy", "entropy", column="entropy"),
    ShownMetric("actor/pg_loss", "Policy loss", "policy loss"),
    ShownMetric("critic/vf_loss", "Value loss", "value loss"),
    ShownMetric("critic/vf_explained_var", "Explained variance", "explained variance"),
    ShownMetric("actor/grad_norm", "Gradient norm", "actor"),
    ShownMetric("critic/grad_norm", "Gradient norm", "critic"),
    ShownMetric("response_length/mean", "Response length", "mean"),
    ShownMetric("response_length/max", "Response length", "longest"),
    ShownMetric("response_length/clip_ratio", "Cut responses", "share"),
    ShownMetric("episode/turns/mean", "Turns and tool calls", "turns"),
    ShownMetric("episode/tool_calls/mean", "Turns and tool calls", "tool calls"),
    ShownMetric("episode/tool_s/mean", "Tool time", "seconds"),
    ShownMetric("critic/returns/mean", "Returns and values", "returns"),
    ShownMetric("critic/values/mean", "Returns and values", "values"),
    ShownMetric("critic/advantages/mean", "Returns and values", "advantages"),
    ShownMetric("dynamic_sampling/kept_share", "Groups that teach", "share"),
    ShownMetric("rollout/mismatch_kl", "Mismatch of rollout and learner", "mismatch KL"),
    ShownMetric("rollout/logprob_diff_max", "Largest log-prob difference", "largest difference"),
    ShownMetric(TOKENS_PER_S, "Throughput", "tokens/s", column="tokens/s", format=",.0f"),
    ShownMetric("perf/tokens_per_s_per_gpu", "Throughput per GPU", "tokens/s per GPU", format=",.0f"),
    ShownMetric(MFU, "Utilisation", "MFU of the update"),
    ShownMetric("perf/computed_share", "Utilisation", "computed share"),
    ShownMetric("perf/overhead_share", "Utilisation", "overhead"),
    ShownMetric("weights/transfer_ms", "Weight push", "transfer"),
    ShownMetric("weights/pause_ms", "Weight push", "pause"),
    # The phases' order in the stacked chart, from the bottom up.
    ShownMetric("timing_s/gen", PHASES, "gen", column="gen", format=".2f", unit="s"),
    ShownMetric("timing_s/reward", PHASES, "reward", column="score", format=".2f", unit="s"),
    ShownMetric("timing_s/learn", column="learn", format=".2f", unit="s"),  # its parts follow
    ShownMetric("timing_s/fetch", PHASES, "fetch"),
    ShownMetric("timing_s/old_log_prob", PHASES, "old_log_prob"),
    ShownMetric("timing_s/ref", PHASES, "ref"),
    ShownMetric("timing_s/values", PHASES, "values"),
    ShownMetric("timing_s/adv", PHASES, "adv"),
    ShownMetric("timing_s/update_critic", PHASES, "update_critic"),
    ShownMetric("timing_s/update_actor", PHASES, "update_actor"),
    ShownMetric("timing_s/update_weights", PHASES, "update_weights", column="push", format=".2f", unit="s"),
    ShownMetric(STEP_SECONDS, column="step", format=".2f", unit="s"),
    ShownMetric("ahead/scored_share", "Work ahead", "scored"),
    ShownMetric("ahead/gradient_share", "Work ahead", "with their gradient"),
    ShownMetric("barrier/wait_s", "Barrier wait", "wait", column="wait", format=".2f", unit="s"),
    ShownMetric("perf/memory_gib/update_actor", "Learner's GPU memory", "update of the policy"),
    ShownMetric("perf/memory_gib/update_critic", "Learner's GPU memory", "update of the critic"),
    ShownMetric("perf/memory_gib/old_log_prob", "Learner's GPU memory", "old log-probs"),
    *(
        ShownMetric(f"perf/{name}/{kind}", title, kind)
        for name, title in _MACHINES.items()
        for kind in ("rollout", "learner", "reward", "controller")
    ),
    ShownMetric("actor/lr", "Learning rate", "actor"),
    ShownMetric("critic/lr", "Learning rate", "critic"),
)

# A run without a reference or a penalty writes zeros for these.
WITHOUT_ZEROS = frozenset({"KL", "KL coefficient"})

# Explains a chart's title.
CHART_NOTES: Mapping[str, str] = {
    "KL": "to the reference per token, and of the update",
    "KL coefficient": "of the penalty in the reward",
    "Clip fractions": "share of tokens that clipping bounds",
    "Entropy": "of the policy, nats per token",
    "Policy loss": "mean over mini-batches",
    "Value loss": "clipped squared error",
    "Explained variance": "of the returns by the values; 1 is perfect",
    "Gradient norm": "before clipping",
    "Response length": "tokens that the policy sampled",
    "Turns and tool calls": "means over episodes",
    "Tool time": "mean over episodes, of all calls together",
    "Learner's GPU memory": "the most that tensors took in a phase, GiB",
    "GPU utilisation": "share of the time in which a kernel ran, mean over GPUs",
    "GPU memory in use": "the fullest GPU of a kind, GiB",
    "CPU cores in use": "by processes and what they started",
    "Memory of processes": "resident, GiB; shared pages count for each",
    "Work ahead": "share of the rows, done before the batch was complete",
    "Cut responses": "share that hit data.max_response_length",
    "Returns and values": "means over tokens",
    "Groups that teach": "share of all that dynamic sampling asked for",
    "Mismatch of rollout and learner": "KL estimate per token",
    "Largest log-prob difference": "rollout against learner, any token",
    "Spread of rewards": "over the samples of a step",
    "Groups without spread": "share whose samples all have the same reward: they teach nothing",
    "Utilisation": "MFU; arithmetic left when prompts are shared; share of a step that is overhead",
    "Throughput": "prompt and response tokens per second of a step",
    "Weight push": "milliseconds",
    "Barrier wait": "seconds between the first and the last trajectory",
    "Learning rate": "peak times schedule",
}


def charts() -> dict[str, list[ShownMetric]]:
    """Returns the metrics of each chart, by the chart's title."""
    by_title: dict[str, list[ShownMetric]] = {}
    for metric in METRICS:
        if metric.chart:
            by_title.setdefault(metric.chart, []).append(metric)
    return by_title


def columns(names: Iterable[str]) -> list[Column]:
    """Returns the columns of the live view; each set of held-out prompts has its own.

    Args:
        names: names of the metrics of the steps that are shown.
    """
    of_sets = {of: ShownMetric(name) for of, name in val_rewards(names).items()}
    by_title: dict[str, list[ShownMetric]] = {}
    for metric in METRICS:
        if metric.column:
            by_title.setdefault(metric.column, []).append(metric)
    shown = []
    for title, group in by_title.items():
        if group[0].name == VAL_REWARD and of_sets:
            shown += [Column(title=f"{title} {of}".rstrip(), metrics=(m,)) for of, m in of_sets.items()]
        else:
            shown.append(Column(title=title, metrics=tuple(group)))
    return shown
