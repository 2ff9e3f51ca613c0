"""`paceline eval`: answers held-out prompts with a model or a run's checkpoint, and measures the answers."""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from paceline.checks.preflight import notes, quick_check
from paceline.cli.commands.arguments import Form, add_offline, add_overrides
from paceline.cli.commands.results.export import chosen_step, export_step
from paceline.cli.commands.start.train import train
from paceline.config.data import DataConfig
from paceline.config.load import load, parse, with_overrides
from paceline.config.run import RunConfig
from paceline.config.training.actor import ActorConfig
from paceline.config.validation import HeldOutSet
from paceline.core.errors import CheckpointError, ConfigError
from paceline.core.samples.evaluation import (
    Estimate,
    EvaluatedAnswer,
    EvaluationResult,
    evaluate,
    final_answer,
    gain,
)
from paceline.data.hub import local_files
from paceline.data.rows import read_rows, value_at
from paceline.runs import run_dir as run_dirs
from paceline.service.process import die_with_parent
from paceline.sizing.machine import Machine
from paceline.sizing.placement import settle

RESULTS = "evaluation.json"
ANSWERS = Path("trajectories") / "val_000000.parquet"
# Sections of a run's configuration that only training reads.
_OF_TRAINING = ("algorithm", "actor", "critic", "guard", "barrier", "broker", "service", "trainer")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of this command."""
    parser.add_argument(
        "target",
        metavar="MODEL|CONFIG|RUN[@STEP]",
        help="what to evaluate: a model (folder or name on the hub); a configuration file (the model that "
        "the run would start from); or a run (its newest checkpoint, or that of STEP)",
    )
    add_overrides(parser, of="the configuration (of CONFIG or RUN, if given)")
    parser.add_argument(
        "--data",
        action="append",
        default=[],
        metavar="NAME=FILE[,FILE]",
        help="a set of prompts; may be given several times (default: RUN's data.val_files and data.val_sets)",
    )
    parser.add_argument(
        "--reward",
        metavar="FUNCTION",
        help="reward function, as in reward.functions.N.name; needed with MODEL",
    )
    parser.add_argument("--n", type=int, help="answers per prompt (default: RUN's rollout.val.n, or 1)")
    parser.add_argument("--temperature", type=float, help="sampling temperature (default: RUN's, or 0)")
    parser.add_argument(
        "--right-above",
        type=float,
        metavar="REWARD",
        help="an answer counts as right if its reward is above this (default: RUN's rollout.val.right_above, "
        "or 0)",
    )
    parser.add_argument("--out", help="folder to write to (default: runs/evaluations/NAME)")
    parser.add_argument(
        "--against",
        metavar="FOLDER",
        help="an earlier evaluation of the same prompts (its --out): also print the gain since then",
    )
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    add_offline(parser)


def run(args: argparse.Namespace) -> int:
    """Evaluates; returns the exit code."""
    die_with_parent()
    then = Path(args.against) / ANSWERS if args.against else None
    if then and not then.is_file():
        raise ConfigError(f"--against {args.against} is no folder of an evaluation: it has no {ANSWERS}")
    sets = _sets(args.data)
    folder, step = _run_of(args.target)
    is_config = folder is None and args.target.endswith((".yaml", ".yml"))
    tree: dict[str, Any] = {}
    if folder is not None:
        tree = yaml.safe_load((folder / run_dirs.RESOLVED).read_text(encoding="utf-8"))
    elif is_config:
        tree = load(RunConfig, args.target).model_dump(mode="json")
    tree = {section: values for section, values in tree.items() if section not in _OF_TRAINING}
    tree["data"] = _data(tree.get("data", {}), sets, args)
    last = Path(args.target).stem if is_config else args.target.strip("/").rpartition("/")[2]
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", last) or "model"
    out = Path(args.out or run_dirs.RUNS / "evaluations" / name)
    tree = with_overrides(_tree(tree, args, out), args.overrides)
    if tree["trainer"]["total_steps"]:
        raise ConfigError("an evaluation trains nothing: leave out trainer.total_steps")
    _make_room(tree)
    if folder is not None:
        tree["model"]["path"] = str(_exported(folder, step, out))
    settled = settle(parse(RunConfig, tree, "the evaluation"), Machine.here())
    quick_check(settled.config)
    with contextlib.redirect_stdout(sys.stderr):
        code = train(settled.config, form=Form.PLAIN, remarks=[*settled.remarks, *notes(settled.config)])
    if code:
        return code
    is_same = then is not None and _have_same_prompts(then, out / ANSWERS)
    results, gains = _results(settled.config, out, _answers(then) if then and is_same else [])
    plain = {
        name: result.as_json() | ({"gain": asdict(gains[name])} if name in gains else {})
        for name, result in results.items()
    }
    (out / RESULTS).write_text(json.dumps(plain, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(plain, indent=2) if args.json else table(results, gains))
    if then and not is_same:
        raise ConfigError(
            f"no gain since {args.against}, which answered other prompts; give both evaluations the "
            "same --data"
        )
    return 0


def _sets(given: Sequence[str]) -> dict[str, list[str]]:
    sets: dict[str, list[str]] = {}
    for word in given:
        name, _, files = word.partition("=")
        if not name or not files:
            raise ConfigError(f"--data {word} must look like NAME=FILE, such as gsm8k=gsm8k/test.parquet")
        if name in sets:
            raise ConfigError(f"--data names {name} twice; write NAME=FILE,FILE for several files of a set")
        sets[name] = files.split(",")
    return sets


def _run_of(target: str) -> tuple[Path | None, str]:
    """Returns the run's folder, or None for a model, and the step."""
    name, _, step = target.partition("@")
    for folder in (Path(name), run_dirs.RUNS / name):
        if (folder / run_dirs.RESOLVED).is_file():
            return folder.resolve(), step or "latest"
    return None, ""


_OPTIONS = ("n", "temperature", "right_above")


def _data(
    data: Mapping[str, Any], sets: Mapping[str, Sequence[str]], args: argparse.Namespace
) -> dict[str, Any]:
    """Returns the data section with these sets, or with those of the run; all their prompts are answered.

    Raises:
        ConfigError: there are no sets.
    """
    given = [name for name in _OPTIONS if getattr(args, name) is not None]
    named: dict[str, Any] = {name: {"files": list(files)} for name, files in sets.items()}
    for name, of_run in data.get("val_sets", {}).items() if not sets else ():
        changed = dict.fromkeys((*given, "max_prompts", *(["reward"] if args.reward else [])))
        named[name] = {**({"files": of_run} if isinstance(of_run, str | list) else of_run), **changed}
    unnamed = [] if sets else list(data.get("val_files", ()))
    files = [*unnamed, *(file for of_set in named.values() for file in of_set["files"])]
    if not files:
        raise ConfigError("name the held-out prompts: --data NAME=FILE")
    own = {"train_files": files, "val_files": unnamed, "val_sets": named}
    training: dict[str, Any] = {
        "train_sets": {},
        "curriculum": [],
        "order_by": None,
        "train_max_prompts": None,
    }
    return {**data, **own, **training, "val_max_prompts": None, "train_batch_size": 1}


def _tree(tree: dict[str, Any], args: argparse.Namespace, out: Path) -> dict[str, Any]:
    """Returns the configuration of a run that validates its starting model and then ends."""
    rollout = dict(tree.get("rollout", {}))
    # Nothing is trained, so all servers answer.
    rollout.pop("validation_servers", None)
    sampling = dict(rollout.get("val", {}))
    sampling |= {name: getattr(args, name) for name in _OPTIONS if getattr(args, name) is not None}
    if sampling.get("n", 1) > 1 and not sampling.get("temperature"):
        raise ConfigError(
            f"{sampling['n']} answers per prompt at a temperature of 0 would all be the same: "
            "add --temperature 1"
        )
    model = dict(tree.get("model", {})) or {"path": args.target}
    model |= {"lora": None, "load_format": "auto"}
    reward = tree.get("reward", {})
    if args.reward:
        reward = {"functions": [{"name": args.reward}]}
    if not reward and not any(word.startswith("reward.") for word in args.overrides):
        raise ConfigError(
            "name the reward function that scores the answers, such as --reward gsm8k or "
            "--reward path/to/file.py:function"
        )
    return {
        **tree,
        "model": model,
        "actor": {"ppo_mini_batch_size": 1},
        "rollout": {**rollout, "val": sampling},
        "reward": reward,
        "trainer": {
            "name": out.name,
            "run_dir": str(out),
            "total_steps": 0,
            "resume": "never",
            "export_model": False,
            "save_tokens": False,
        },
    }


def _make_room(tree: dict[str, Any]) -> None:
    """Lifts the limits on lengths, because the learner trains nothing."""
    limits = parse(DataConfig, tree["data"], "the evaluation: data")
    longest = limits.max_prompt_length + limits.max_response_length
    if longest > ActorConfig().ppo_max_token_len_per_gpu:
        tree["actor"].setdefault("ppo_max_token_len_per_gpu", longest)


def _exported(folder: Path, step: str, out: Path) -> Path:
    """Exports the checkpoint of a run as a model's folder, next to the evaluation."""
    number = chosen_step(folder, step)
    model = out.with_name(f"{out.name}.step_{number}")
    if not model.exists() and export_step(folder, number, model, says_so=False):
        raise CheckpointError(f"the checkpoint of step {number} of {folder} was not exported")
    return model


def _results(
    config: RunConfig, out: Path, earlier: Sequence[EvaluatedAnswer]
) -> tuple[dict[str, EvaluationResult], dict[str, Estimate]]:
    """Measures each set, and each data source in it if there are several; also returns gains by name.

    Args:
        earlier: answers to the same prompts from an earlier evaluation, if any.
    """
    answers = _answers(out / ANSWERS)
    results: dict[str, EvaluationResult] = {}
    gains: dict[str, Estimate] = {}

    def measure(name: str, prompts: Collection[int], right_above: float) -> None:
        own, own_then = ([a for a in each if a.prompt in prompts] for each in (answers, earlier))
        results[name] = evaluate(own, num_asked=len(prompts), right_above=right_above)
        if grown := gain(own_then, own, right_above=right_above):
            gains[name] = grown

    for held_out, sources in _rows(config):
        name, right_above = held_out.name or "val", held_out.right_above
        scored = {answer.prompt for answer in answers if answer.reward is not None}
        if not scored & sources.keys():
            raise ConfigError(f"no answer to {name} was scored: all its prompts are too long or were dropped")
        measure(name, sources, right_above)
        kinds = sorted(set(sources.values()))
        for kind in kinds if len(kinds) > 1 else ():
            of_kind = {prompt for prompt, source in sources.items() if source == kind}
            if scored & of_kind:
                measure(f"{name}/{kind}", of_kind, right_above)
    return results, gains


def _rows(config: RunConfig) -> Iterator[tuple[HeldOutSet, dict[int, str]]]:
    """Yields each set with the data source of each prompt, keyed by the prompt's row in all files."""
    key, count = config.data.data_source_key, 0
    for held_out in config.held_out_sets:
        rows = read_rows(local_files(held_out.files, "val"))
        kinds = [str(value_at(row, key) or "") if key else "" for row in rows]
        yield held_out, dict(enumerate(kinds, start=count))
        count += len(rows)


def _answers(file: Path) -> list[EvaluatedAnswer]:
    import pyarrow.parquet

    columns = ["prompt_id", "response", "reward", "num_sampled_tokens", "finish_reason"]
    return [
        EvaluatedAnswer(
            prompt=row["prompt_id"],
            reward=row["reward"],
            final=final_answer(row["response"]),
            num_tokens=row["num_sampled_tokens"],
            is_cut=row["finish_reason"] == "length",
        )
        for row in pyarrow.parquet.read_table(file, columns=columns).to_pylist()
    ]


def _have_same_prompts(then: Path, now: Path) -> bool:
    import pyarrow.parquet

    columns = ["prompt_id", "prompt"]
    tables = [pyarrow.parquet.read_table(file, columns=columns).to_pydict() for file in (then, now)]
    first, second = (dict(zip(each["prompt_id"], each["prompt"], strict=True)) for each in tables)
    return all(first[prompt] == second[prompt] for prompt in first.keys() & second.keys())


def table(results: Mapping[str, EvaluationResult], gains: Mapping[str, Estimate] | None = None) -> str:
    """Formats the results as aligned lines, one per set."""
    rows = [["set", "prompts", "missing", "n", "reward", "avg@n", "pass@k", "maj@k", "tokens", "cut off"]]
    rows[0] += ["gain"] if gains else []
    for name, result in results.items():
        rows.append(
            [
                name,
                str(result.num_prompts),
                str(result.num_missing),
                str(result.num_samples),
                _shown(result.reward),
                _shown(result.right),
                " ".join(f"{k}: {_shown(estimate)}" for k, estimate in result.pass_at.items() if k > 1)
                or "-",
                " ".join(f"{k}: {_shown(estimate)}" for k, estimate in result.majority_at.items()) or "-",
                f"{result.length.value:.0f}",
                f"{100 * result.cut.value:.1f}%",
                *([_shown(gains[name], sign="+") if name in gains else "-"] if gains else []),
            ]
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _shown(estimate: Estimate, sign: str = "") -> str:
    return f"{estimate.value:{sign}.3f} [{estimate.low:{sign}.3f}, {estimate.high:{sign}.3f}]"
