"""The metrics that people are shown: one line for each, read by the report, the live view and the summary."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

REWARD = "Reward"
PHASES = "Seconds per phase"

TRAIN_REWARD = "critic/score/mean"
VAL_REWARD = "val/reward/mean"
STEP_SECONDS = "timing_s/step"
TOKENS_PER_S = "perf/tokens_per_s"
MFU = "perf/mfu"

# Compared before and after, at the head of the page and in the run's closing lines.
HEADLINES: Mapping[str, str] = {"Validation reward": VAL_REWARD, "Training reward": TRAIN_REWARD}


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric of metrics.jsonl and where it is shown. Metrics with the same chart or column share it.

    Attributes:
        name: its key in metrics.jsonl.
        chart: title of its chart on the report; "" for none.
        label: its line's name in that chart.
        dots: marks every point of the line, for a metric that only some steps have.
        column: its column in the live view; "" for none.
        format: how the column prints it.
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
    metrics: tuple[Metric, ...]

    @property
    def unit(self) -> str:
        """The unit of its numbers; "" for none."""
        return self.metrics[0].unit

    def cell(self, values: Mapping[str, float]) -> str:
        """The number of a step, formatted; "" where the step has none of the column's metrics."""
        return next((f"{values[m.name]:{m.format}}" for m in self.metrics if m.name in values), "")


# Charts and columns come in the order of their first line here, the lines of a chart in the order of theirs.
METRICS: tuple[Metric, ...] = (
    Metric(TRAIN_REWARD, REWARD, "training", column="reward"),
    Metric(VAL_REWARD, REWARD, "validation", dots=True, column="val"),
    Metric("dynamic_sampling/reward_mean", REWARD, "all samples, groups set aside too"),
    Metric("reward/std", "Spread of rewards", "standard deviation"),
    Metric("groups/without_spread", "Groups without spread", "share"),
    # The column KL is to the reference where the run measures it, else of the update.
    Metric("algorithm/reference_kl", "KL", "to the reference", column="KL", format=".4f"),
    Metric("actor/kl_loss", "KL", "KL loss", column="KL", format=".4f"),
    Metric("actor/ppo_kl", "KL", "old to new policy", column="KL", format=".4f"),
    Metric("actor/ppo_kl_max", "KL", "the same, worst mini-batch"),
    Metric("algorithm/kl_coef", "KL coefficient", "coefficient"),
    Metric("actor/pg_clipfrac", "Clip fractions", "policy", column="clip"),
    Metric("actor/pg_clipfrac_lower", "Clip fractions", "dual clip"),
    Metric("critic/vf_clipfrac", "Clip fractions", "value"),
    Metric("actor/entropy", "Entropy", "entropy", column="entropy"),
    Metric("actor/pg_loss", "Policy loss", "policy loss"),
    Metric("critic/vf_loss", "Value loss", "value loss"),
    Metric("critic/vf_explained_var", "Explained variance", "explained variance"),
    Metric("actor/grad_norm", "Gradient norm", "actor"),
    Metric("critic/grad_norm", "Gradient norm", "critic"),
    Metric("response_length/mean", "Response length", "mean"),
    Metric("response_length/max", "Response length", "longest"),
    Metric("response_length/clip_ratio", "Cut responses", "share"),
    Metric("episode/turns/mean", "Turns and tool calls", "turns"),
    Metric("episode/tool_calls/mean", "Turns and tool calls", "tool calls"),
    Metric("episode/tool_s/mean", "Tool time", "seconds"),
    Metric("critic/returns/mean", "Returns and values", "returns"),
    Metric("critic/values/mean", "Returns and values", "values"),
    Metric("critic/advantages/mean", "Returns and values", "advantages"),
    Metric("dynamic_sampling/kept_share", "Groups that teach", "share"),
    Metric("rollout/mismatch_kl", "Mismatch of rollout and learner", "mismatch KL"),
    Metric("rollout/logprob_diff_max", "Largest log-prob difference", "largest difference"),
    Metric(TOKENS_PER_S, "Throughput", "tokens/s", column="tokens/s", format=",.0f"),
    Metric("perf/tokens_per_s_per_gpu", "Throughput per GPU", "tokens/s per GPU", format=",.0f"),
    Metric(MFU, "Utilisation", "MFU of the update"),
    Metric("perf/computed_share", "Utilisation", "computed share"),
    Metric("perf/overhead_share", "Utilisation", "overhead"),
    Metric("weights/transfer_ms", "Weight push", "transfer"),
    Metric("weights/pause_ms", "Weight push", "pause"),
    # From the bottom of the stack up.
    Metric("timing_s/gen", PHASES, "gen", column="gen", format=".2f", unit="s"),
    Metric("timing_s/reward", PHASES, "reward", column="score", format=".2f", unit="s"),
    Metric("timing_s/learn", column="learn", format=".2f", unit="s"),  # its parts follow
    Metric("timing_s/fetch", PHASES, "fetch"),
    Metric("timing_s/old_log_prob", PHASES, "old_log_prob"),
    Metric("timing_s/ref", PHASES, "ref"),
    Metric("timing_s/values", PHASES, "values"),
    Metric("timing_s/adv", PHASES, "adv"),
    Metric("timing_s/update_critic", PHASES, "update_critic"),
    Metric("timing_s/update_actor", PHASES, "update_actor"),
    Metric("timing_s/update_weights", PHASES, "update_weights", column="push", format=".2f", unit="s"),
    Metric(STEP_SECONDS, column="step", format=".2f", unit="s"),
    Metric("ahead/scored_share", "Work ahead", "scored"),
    Metric("ahead/gradient_share", "Work ahead", "with their gradient"),
    Metric("barrier/wait_s", "Barrier wait", "wait", column="wait", format=".2f", unit="s"),
    Metric("perf/memory_gib/update_actor", "Learner's GPU memory", "update of the policy"),
    Metric("perf/memory_gib/update_critic", "Learner's GPU memory", "update of the critic"),
    Metric("perf/memory_gib/old_log_prob", "Learner's GPU memory", "old log-probs"),
    Metric("actor/lr", "Learning rate", "actor"),
    Metric("critic/lr", "Learning rate", "critic"),
)

# A run without a reference or a penalty writes zeros for these.
WITHOUT_ZEROS = frozenset({"KL", "KL coefficient"})

# What a chart's title leaves open.
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
    "Work ahead": "share of the rows, done before the batch was complete",
    "Cut responses": "share that hit data.max_response_length",
    "Returns and values": "means over tokens",
    "Groups that teach": "share of all that dynamic sampling asked for",
    "Mismatch of rollout and learner": "KL estimate per token",
    "Largest log-prob difference": "rollout against learner, any token",
    "Spread of rewards": "over the samples of a step",
    "Groups without spread": "share whose samples all have the same reward: they teach nothing",
    "Utilisation": "MFU; arithmetic left by sharing prompts; share of a step that is no work",
    "Throughput": "prompt and response tokens per second of a step",
    "Weight push": "milliseconds",
    "Barrier wait": "seconds between the first and the last trajectory",
    "Learning rate": "peak times schedule",
}


def charts() -> dict[str, list[Metric]]:
    """The metrics of each chart, by the chart's title."""
    by_title: dict[str, list[Metric]] = {}
    for metric in METRICS:
        if metric.chart:
            by_title.setdefault(metric.chart, []).append(metric)
    return by_title


def columns() -> list[Column]:
    """The columns of the live view."""
    by_title: dict[str, list[Metric]] = {}
    for metric in METRICS:
        if metric.column:
            by_title.setdefault(metric.column, []).append(metric)
    return [Column(title=title, metrics=tuple(group)) for title, group in by_title.items()]
