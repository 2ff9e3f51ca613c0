"""The card of a trained model: the README.md of its folder, as the Hugging Face hub shows it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import yaml

from paceline.config.run import RunConfig
from paceline.service.packages import version
from paceline.show.metrics import headlines
from paceline.show.report.lines import read_jsonl
from paceline.storage.hub import HubName


def model_card(config: RunConfig, run_dir: Path, step: int) -> str:
    """Describes the model, its base model, the training and its effect.

    The card shows only the last part of a path on this machine.
    """
    places = [place for part in config.data.training_sets for place in part.files]
    base, data = _public(config.model.path), [_public(place) for place in places]
    front = {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["paceline", "reinforcement-learning", config.algorithm.name],
    }
    if HubName.parse(config.model.path) is not None:
        front["base_model"] = base
    named = [_public(place) for place in places if HubName.parse(place) is not None]
    if named:
        front["datasets"] = named
    program = f"Paceline {version('paceline') or ''}".strip()
    lines = [
        "---",
        yaml.safe_dump(front, sort_keys=False).strip(),
        "---",
        "",
        f"# {config.trainer.name}",
        "",
        f"`{base}` after {step} steps of reinforcement learning with {program}.",
        "",
        "| | |",
        "| --- | --- |",
        *(f"| {name} | {value} |" for name, value in _facts(config, data)),
        *(f"| {title.lower()} | {change} |" for title, change in _changes(run_dir, step)),
        "",
        "This card was written by a program; the rewards are those of the run itself, on its own prompts.",
        "",
    ]
    return "\n".join(lines)


def _facts(config: RunConfig, data: list[str]) -> Iterator[tuple[str, str]]:
    reward, actor = config.reward, config.actor
    scorers = [_public(function.name) for function in reward.functions]
    scorers += [service.name for service in reward.services]
    yield "trained from", f"`{base}`" if (base := _public(config.model.path)) else ""
    yield "prompts", ", ".join(f"`{name}`" for name in data)
    yield "rewards", ", ".join(f"`{name}`" for name in scorers) or "others"
    yield "advantages", config.algorithm.name
    yield "samples per prompt, prompts per step", f"{config.rollout.n}, {config.data.train_batch_size}"
    yield "learning rate", f"{actor.optim.lr:g}"
    yield "weights", config.model.dtype
    if config.model.lora is not None:
        yield "adapters", f"LoRA of rank {config.model.lora.rank}, merged"


def _changes(run_dir: Path, step: int) -> Iterator[tuple[str, str]]:
    seen: dict[str, tuple[tuple[int, float], tuple[int, float]]] = {}
    names: dict[str, None] = {}
    for row in read_jsonl(run_dir / "metrics.jsonl"):
        if row.get("step", step + 1) > step:
            continue
        names |= dict.fromkeys(row)
        for title, name in headlines(row).items():
            if isinstance(value := row.get(name), int | float):
                point = row["step"], value
                seen[title] = seen.get(title, (point, point))[0], point
    for title in headlines(names):
        (first, before), (last, after) = seen.get(title, ((0, 0.0), (0, 0.0)))
        if first != last:
            yield title, f"{before:.3f} (step {first}), {after:.3f} (step {last})"


def _public(place: str) -> str:
    """Returns a hub name without its commit, or the last part of a path."""
    name = HubName.parse(place)
    return name.repo if name is not None else Path(place.partition(":")[0] or place).name
