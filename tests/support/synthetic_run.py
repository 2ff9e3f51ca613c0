"""A run directory with invented numbers, in the shape that a run leaves."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pyarrow
import pyarrow.parquet


def write_run(folder: Path, *, num_steps: int) -> Path:
    """Writes metrics, journal, trajectories and configuration; returns the folder."""
    draw = random.Random(5)
    folder.mkdir(parents=True)
    lines: list[dict[str, float | int | None]] = [{"step": 0, "val/reward/mean": 0.31, **_of_set(0.5)}]
    lines += [metrics_of(step, num_steps, draw) for step in range(1, num_steps + 1)]
    lines[-1]["val/reward/mean"] = 0.92
    lines[num_steps // 2] |= _of_set(0.75)
    lines[-1] |= _of_set(0.625)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in _events()))
    (folder / "config.resolved.yaml").write_text(
        "trainer:\n  total_steps: 60\nbroker:\n  url: redis://:hunter2@10.0.0.1:6379/0\n"
    )
    spans = [span for step in range(1, num_steps + 1) for span in spans_of(step)]
    (folder / "spans.jsonl").write_text("".join(json.dumps(span) + "\n" for span in spans))
    for name, step in (("step", 1), ("step", num_steps), ("val", num_steps)):
        _trajectories(folder / "trajectories", name, step, draw)
    return folder


def _of_set(mean: float) -> dict[str, float | int | None]:
    """The numbers of a set of held-out prompts."""
    return {
        "val/hard/reward/mean": mean,
        "val/hard/reward/low": mean - 0.125,
        "val/hard/reward/high": mean + 0.125,
        "val/hard/avg_at_16": mean,
        "val/hard/pass_at_2": mean + 0.1,
        "val/hard/pass_at_16": 1.0,
        "val/hard/maj_at_16": mean + 0.05,
        "val/hard/cut_off": 0.25,
        "val/hard/response_length/mean": 123.4,
        "val/hard/num_prompts": 40.0,
    }


def metrics_of(step: int, num_steps: int, draw: random.Random) -> dict[str, float | int | None]:
    """The metrics of a step."""
    done = step / num_steps
    seconds = {
        "gen": 1.4 + draw.random() * 0.3,
        "reward": 0.05,
        "old_log_prob": 0.25,
        "ref": 0.22,
        "values": 0.2,
    }
    seconds |= {"adv": 0.01, "update_critic": 0.8, "update_actor": 0.9, "update_weights": 0.06}
    metrics: dict[str, float | int | None] = {"step": step}
    metrics |= {f"timing_s/{name}": value for name, value in seconds.items()}
    metrics |= {
        "timing_s/learn": 2.4,
        "timing_s/step": sum(seconds.values()) + 0.2,
        "critic/score/mean": 0.35 + 0.6 * (1 - math.exp(-3 * done)) + draw.gauss(0, 0.03),
        "critic/vf_loss": 0.2 * math.exp(-2 * done) + draw.random() * 0.02,
        "critic/vf_clipfrac": draw.random() * 0.05,
        "critic/vf_explained_var": 1 - math.exp(-3 * done),
        "critic/grad_norm": 1 + draw.random(),
        "actor/entropy": 1.3 * math.exp(-done),
        "actor/pg_loss": draw.gauss(0, 0.01),
        "actor/pg_clipfrac": 0.03 + draw.random() * 0.02,
        "actor/pg_clipfrac_lower": 0.0,
        "actor/ppo_kl": draw.random() * 0.002,
        "actor/grad_norm": 0.5 + draw.random() * 0.4,
        "actor/lr": 1e-4 * (1 - done),
        "algorithm/reference_kl": 0.02 * done + draw.random() * 0.002,
        "algorithm/kl_coef": 0.01 * (1 + done),
        "rollout/mismatch_kl": draw.random() * 1e-9,
        "rollout/logprob_diff_max": 2e-6 + draw.random() * 1e-6,
        "response_length/mean": 4 + draw.random(),
        "response_length/max": 9,
        "response_length/clip_ratio": None if step == 2 else 0.01,
        "perf/tokens_per_s": 5200 + draw.gauss(0, 150),
        "weights/transfer_ms": 8 + draw.random(),
        "weights/pause_ms": 20 + draw.random(),
        "barrier/wait_s": 0.9 + draw.random() * 0.2,
    }
    if step % 10 == 0:
        metrics["val/reward/mean"] = 0.31 + 0.6 * (1 - math.exp(-3 * done))
    return metrics


def _events() -> list[dict[str, object]]:
    events: list[dict[str, object]] = [{"event": "run", "run_id": "demo-1", "step": 0}]
    events += [{"event": "phase", "step": 0, "source": "starting", "to": "forming"}]
    events += _fleet()
    events += [{"event": "trajectory", "id": f"train:1:{i}:0", "verdict": "admitted"} for i in range(512)]
    events += [{"event": "trajectory", "id": "train:1:0:0", "verdict": "duplicate"}] * 3
    events += [
        {
            "event": "group_dropped",
            "step": 7,
            "prompt": 311,
            "reason": "timeout",
            "message": "reward function took longer than 10 s <script>alert(1)</script>",
        },
        _fired(5, "grad_norm", "critic", "warn", 6.0, 10.0, reference=0.5),
        *(_fired(step, "ppo_kl", "actor", "warn", 0.03 + step / 1000, 0.03) for step in (7, 8, 9, 20)),
        _fired(
            20, "ppo_kl", "actor", "skip", 0.06, 0.05, skipped=2
        ),  # the same step once more, after a crash
        {"event": "checkpoint", "step": 50, "folder": "checkpoints/step_000050"},
        {"event": "end", "ok": True, "message": "60 steps done", "step": 60},
    ]
    return [{"n": n, "time": 1_700_000_000.0 + 0.5 * n, **event} for n, event in enumerate(events)]


def _fleet() -> list[dict[str, object]]:
    changes = [("registered", "learner-0"), ("state:ready", "learner-0"), ("registered", "rollout-0")]
    changes += [("state:serving", "rollout-0"), ("dead", "rollout-0"), ("registered", "rollout-0")]
    changes += [("state:serving", "rollout-0")]
    events: list[dict[str, object]] = [
        {"event": "member", "member": who, "what": what} for what, who in changes
    ]
    return [*events, {"event": "commit", "version": 60, "servers": ["rollout-0"]}]


def spans_of(step: int) -> list[dict[str, object]]:
    """The trace of a step."""
    parts = (
        ("controller", "collect", 0.0, 1.4),
        ("rollout-0", "rollout.generate", 0.1, 1.2),
        ("learner-0", "learner.train_step", 1.5, 2.4),
        ("controller", "step", 0.0, 4.0),
    )
    return [
        {
            "service": f"paceline.{instance.partition('-')[0]}",
            "instance": instance,
            "name": name,
            "trace_id": f"{step:032x}",
            "span_id": f"{(step - 1) * len(parts) + number:016x}",
            "start_s": 1_700_000_000.0 + 5 * step + start,
            "duration_s": seconds,
            "attributes": {"paceline.step": step} if name == "step" else {},
        }
        for number, (instance, name, start, seconds) in enumerate(parts)
    ]


def _fired(
    step: int,
    rule: str,
    network: str,
    action: str,
    value: float,
    bound: float,
    reference: float = 0.0,
    skipped: int = 0,
) -> dict[str, object]:
    return {
        "event": "guard",
        "step": step,
        "rule": rule,
        "network": network,
        "action": action,
        "value": value,
        "bound": bound,
        "reference": reference,
        "skipped": skipped,
    }


def _trajectories(folder: Path, name: str, step: int, draw: random.Random) -> None:
    folder.mkdir(exist_ok=True)
    rows = []
    for prompt in range(16):
        left, right = draw.randrange(100), draw.randrange(100)
        for sample in range(4):
            right_answer = draw.random() < 0.6
            rows.append(
                {
                    "step": step,
                    "prompt_id": prompt,
                    "sample_index": sample,
                    "prompt": f"What is {left} + {right}? <b>Answer:</b>",
                    "response": str(left + right + (0 if right_answer else 10)),
                    "ground_truth": str(left + right),
                    "reward": float(right_answer),
                    "components": json.dumps({"exact_match": float(right_answer), "brevity": 0.5}),
                    "num_response_tokens": 4,
                    "num_sampled_tokens": 3,
                    "finish_reason": "stop",
                    "response_token_ids": [4, 5, 6, 7],
                    "response_log_probs": [-0.1, -0.2, -3.0, -0.1],
                    "learner_log_probs": [-0.1, -0.25, -3.0, -0.1],
                    "response_mask": [1, 1, 0, 1],
                    "segment_starts": [2],
                }
            )
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / f"{name}_{step:06d}.parquet")
