"""docs/metrics.md: every number that the program names in metrics.jsonl is in it, and no other."""

from __future__ import annotations

import ast
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path

from paceline.controller.run.records.metrics import MetricsFile
from paceline.core.run_record.step_metrics import STEP_METRICS, meaning
from support import source

_KEY = re.compile(
    r"(actor|ahead|algorithm|barrier|critic|dataflow|dynamic_sampling|episode|groups|guard|overlong|perf|replay"
    r"|resample|response_length|reward|rollout|timing_s|val|weights)(/[\w]+|/NAME)+"
)
_LOSSES = "paceline.algorithms.policy_losses"
_OF_EACH_NETWORK = ("grad_norm", "lr", "skipped_updates")


def _named() -> Iterator[str]:
    for module, path in source.modules().items():
        if module.startswith(_LOSSES):
            yield from _of_losses(path)
        if not re.match(r"paceline\.(controller|learner)\b", module):
            continue
        for node in ast.walk(source.tree(path)):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("stopwatch.phase"):
                yield f"timing_s/{ast.literal_eval(node.args[0])}"
            if isinstance(node, ast.Dict):
                yield from (key for key in map(_text, node.keys) if key and _KEY.fullmatch(key))
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript):
                key = _text(node.targets[0].slice)
                if key and _KEY.fullmatch(key):
                    yield key


def _of_losses(path: Path) -> Iterator[str]:
    for node in ast.walk(source.tree(path)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "LossOutputs":
            metrics = node.args[1]
            assert isinstance(metrics, ast.Dict)
            yield from (f"actor/{ast.literal_eval(key)}" for key in metrics.keys if key is not None)


def _text(node: ast.AST | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(p.value) if isinstance(p, ast.Constant) else "NAME" for p in node.values)
    return ""


def _metrics_of_losses() -> Iterator[str]:
    """Of every policy loss and of router replay; read from the source, which spares the import of torch."""
    for node in source.tree(source.modules()["paceline.learner.train.updating.losses"]).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in (
            "STANDARD_METRICS",
            "REPLAY_METRICS",
        ):
            yield from ast.literal_eval(node.value)


def test_every_metric_is_documented_and_every_documented_one_exists() -> None:
    named = set(_named()) - {"timing_s/NAME"}
    assert len(named) > 60
    named |= {f"{network}/{name}" for network in ("actor", "critic") for name in _OF_EACH_NETWORK}
    named |= {
        f"actor/{name}"
        for name in (
            *_metrics_of_losses(),
            *("pg_loss", "kl_loss", "positive_loss", "load_balance", "NAME"),
            *("teacher_top_k_mass", "policy_top_k_mass"),
        )
    }
    named |= {"critic/vf_loss", "critic/vf_clipfrac"}
    # What is said of sets and sources has their names in front: test_val_sets.py, test_train_sets.py.
    of_sets = ("val/", "train/")
    of_steps = {name for name in STEP_METRICS if not name.startswith(of_sets)}
    assert {name for name in named if not name.startswith(of_sets)} == of_steps


def test_names_of_the_configuration_are_filled_in() -> None:
    assert meaning("reward/gsm8k/mean") == STEP_METRICS["reward/NAME/mean"]
    dropped = "barrier/groups_dropped/reward_timeout"
    assert meaning(dropped) == STEP_METRICS["barrier/groups_dropped/NAME"]
    assert meaning("val/reward/mean") == STEP_METRICS["val/reward/mean"]
    assert meaning("reward/mine") == ""


def test_a_line_says_when_it_was_written(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    before = time.time()
    file.append(1, {"reward/std": 0.5, "actor/lr": float("nan")})
    row = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert list(row) == ["step", "time", "actor/lr", "reward/std"]
    assert before - 0.001 <= row["time"] <= time.time()
    assert row["actor/lr"] is None
