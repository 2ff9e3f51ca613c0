"""Writes a converted configuration as YAML; comments say what became of each key."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import yaml

from paceline.cli.convert.convert import Converted
from paceline.config.load import parse
from paceline.config.run import RunConfig
from paceline.core.errors import ConfigError

_REQUIRED = {
    "trainer.total_steps": "epochs times rows over data.train_batch_size",
    "data.train_files": "parquet or JSONL, or a name on the hub",
    "model.path": "a folder or a name on the hub",
    "reward.functions": "such as [{name: gsm8k}]",
}


def missing_keys(tree: dict[str, Any]) -> dict[str, str]:
    """Returns the keys that a run needs and the tree lacks, each with a hint."""
    reward = tree.get("reward", {})
    lacks = {
        key: hint
        for key, hint in _REQUIRED.items()
        if key.split(".")[1] not in tree.get(key.split(".")[0], {})
    }
    if "total_epochs" in tree.get("trainer", {}):
        lacks.pop("trainer.total_steps", None)
    if reward.get("models"):
        lacks.pop("reward.functions", None)
    return lacks


def fault(tree: dict[str, Any]) -> str:
    """Returns why a run would refuse the tree; "" if it would not."""
    try:
        parse(RunConfig, tree)
    except ConfigError as error:
        return str(error)
    return ""


def text_of(converted: Converted, source: str) -> str:
    """Returns the file's text; `source` is the name of the file that was converted."""
    lines = [f"# From {source}, by paceline convert-config. Then: paceline check FILE\n"]
    lines += [f"# Missing: {key}: {hint}\n" for key, hint in missing_keys(converted.tree).items()]
    lines += [f"# {line}\n" for line in _arithmetic(converted.tree)]
    lines.append(yaml.safe_dump(converted.tree, sort_keys=False, allow_unicode=True))
    for title, group in (
        ("The same", _same(converted)),
        ("Changed, and why", _changed(converted)),
        ("Cannot be", (f"{_line(key)}  ({why})" for key, why in converted.refused.items())),
    ):
        entries = list(group)
        lines += ["\n", f"# {title}:{'' if entries else ' nothing'}\n", *(f"#   {one}\n" for one in entries)]
    idle = [_line(key) for key, ours in converted.same.items() if not ours]
    if idle:
        lines += ["\n", "# These keys change no number of a run, or ask for nothing:\n"]
        lines += [f"#   {key}\n" for key in idle]
    return "".join(lines)


def _same(converted: Converted) -> Iterator[str]:
    for key, ours in converted.same.items():
        if ours:
            yield f"{_line(key)}  ->  {_line(ours)}"


def _changed(converted: Converted) -> Iterator[str]:
    for key, (ours, reason) in converted.changed.items():
        yield f"{_line(key)}  ->  {_line(ours) or 'nothing'}  ({_line(reason)})"


def _arithmetic(tree: dict[str, Any]) -> Iterator[str]:
    """Describes the sizes of a step, if they are known."""
    data, actor, rollout = (tree.get(section, {}) for section in ("data", "actor", "rollout"))
    try:
        prompts, update = int(data["train_batch_size"]), int(actor["ppo_mini_batch_size"])
    except KeyError:
        return
    samples, epochs = int(rollout.get("n", 8)), int(actor.get("ppo_epochs", 1))
    updates = epochs * (prompts // update)
    yield (
        f"A step: {prompts} prompts with {samples} samples each; {updates} update{'s' * (updates > 1)} of "
        f"{update * samples} samples."
    )


def _line(text: str) -> str:
    words = " ".join(text.split())
    return words if len(words) <= 240 else f"{words[:237]}..."
