"""Checks configuration, model, data and reward before a run starts anything."""

from __future__ import annotations

import fnmatch
import json
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.cli.launch.machine import Machine
from paceline.cli.launch.memory_plan import MemoryPlan, ModelShape
from paceline.cli.launch.plan import share_gpus
from paceline.cli.trackers.adapters import check_installed
from paceline.config.load import dump_yaml
from paceline.config.model import ModelConfig
from paceline.config.policy_losses import CustomLoss
from paceline.config.run import RunConfig
from paceline.core.errors import ConfigError, DataError, EnvironmentLackError, ModelError
from paceline.core.reward_function import check_extra_keys
from paceline.service.addresses import split
from paceline.service.gpu_metrics import gpu_memory
from paceline.storage.folder import Folder, is_url
from paceline.storage.hub import is_named
from paceline.storage.models import local_model

_REACH_S = 3.0
# The self-test of Qwen3-30B-A3B takes 23 s on two cores.
_LEARNER_CHECK_S = 300.0
_WEIGHTS = ("*.safetensors", "model.safetensors.index.json")


def quick_check(config: RunConfig, *, here: bool = True) -> None:
    """Those checks of `paceline check` that take no time, before `paceline train` creates anything.

    It loads no tokenizer: data and prompts are the controller's to check.

    Args:
        here: the run's services start on this machine, whose GPUs and network are looked at.

    Raises:
        PacelineError: one of GIVEN_ERRORS; the first fault.
    """
    _engine(config)
    _data_files(config)
    _model(config)
    check_installed(config.trainer.loggers)
    if here:
        _devices(config)
        _reward_services(config)


def notes(config: RunConfig) -> list[str]:
    """What may not be meant as it is written, for people."""
    words = []
    if (
        config.data.prompt_format == "auto"
        and has_chat_template(config.model)
        and _first_prompt_is_text(config)
    ):
        words.append(
            "the prompts are strings, which go to the model without its chat template; "
            "data.prompt_format=chat uses it, as an instruct model expects; text says that this is meant"
        )
    if config.rollout.n == 1 and config.algorithm.estimator.compares_samples:
        words.append(
            f"algorithm.adv_estimator={config.algorithm.adv_estimator} compares the samples of a "
            "prompt, and rollout.n=1 draws only one"
        )
    return words


def has_chat_template(model: ModelConfig) -> bool:
    """Whether the model's tokenizer comes with a chat template; loads no tokenizer."""
    model = local_model(model, "controller")
    folder = Path(model.tokenizer_path or model.path)
    if (folder / "chat_template.jinja").is_file():
        return True
    try:
        return bool(json.loads((folder / "tokenizer_config.json").read_text("utf-8")).get("chat_template"))
    except (OSError, ValueError, AttributeError):
        return False


def _first_prompt_is_text(config: RunConfig) -> bool:
    from paceline.data.hub import local_files
    from paceline.data.rows import first_row, value_at

    try:
        files = local_files(config.data.train_files[:1], "train")
        return isinstance(value_at(first_row(files[0]), config.data.prompt_key), str)
    except (DataError, IndexError):
        return False  # the controller says what is wrong with it


def _data_files(config: RunConfig) -> None:
    from paceline.data.hub import local_files

    data = config.data
    for file in (*local_files(data.train_files, "train"), *local_files(data.val_files, "val")):
        if not file.is_file():
            raise DataError(f"data file {file} does not exist; correct data.train_files or data.val_files")


def _engine(config: RunConfig) -> str:
    from paceline.rollout.engines.registry import check_engine

    check_engine(config)
    return config.rollout.name


def _model_config(config: RunConfig) -> dict[str, Any]:
    """The model's config.json.

    Raises:
        ModelError: no such folder, no readable config.json, or no weights.
    """
    folder = Path(local_model(config.model, "controller").path)
    if not folder.is_dir():
        raise ModelError(
            f"model folder {folder} does not exist; set model.path to a folder in the Hugging Face layout"
        )
    try:
        tree: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"model folder {folder} has no config.json; model.path must name a model") from error
    except ValueError as error:
        raise ModelError(f"{folder / 'config.json'} is not JSON: {error}") from error
    if config.model.load_format == "auto" and not _has_weights(config.model):
        raise ModelError(
            f"model folder {folder} has no weights (*.safetensors); save them there, or set "
            "model.load_format: random"
        )
    return tree


def _has_weights(model: ModelConfig) -> bool:
    if model.paths.learner is not None:
        return True  # on the learner's hosts
    if is_named(model.path):
        return True  # the learner says if there are none
    if not is_url(model.path):
        return any(any(Path(model.path).glob(name)) for name in _WEIGHTS)
    names = Folder.at(model.path).names()
    return any(fnmatch.fnmatch(name, pattern) for name in names for pattern in _WEIGHTS)


def _model(config: RunConfig) -> str:
    tree = _model_config(config)
    longest = tree.get("max_position_embeddings")
    if isinstance(longest, int) and config.max_model_len > longest:
        raise ModelError(
            f"data.max_prompt_length + data.max_response_length = {config.max_model_len} exceed the model's "
            f"max_position_embeddings={longest}; lower them"
        )
    heads, ranks = tree.get("num_attention_heads"), config.rollout.tensor_model_parallel_size
    if isinstance(heads, int) and heads % ranks:
        raise ConfigError(
            f"rollout.tensor_model_parallel_size={ranks} must divide the model's {heads} attention heads"
        )
    architecture = ", ".join(tree.get("architectures") or [str(tree.get("model_type"))])
    return f"{config.model.path}: {architecture}, up to {longest} tokens"


def _tokenizer(config: RunConfig) -> str:
    from paceline.data.prompts import load_tokenizer, stop_token_ids

    model = local_model(config.model, "controller")
    folder = model.tokenizer_path or model.path
    tokenizer = load_tokenizer(folder)
    stops = ", ".join(map(str, stop_token_ids(model.path, tokenizer)))
    return f"{folder}: responses end at token {stops}"


def _prompts(config: RunConfig, split: str) -> str:
    from paceline.data.hub import local_files
    from paceline.data.prompts import PromptSet, load_tokenizer
    from paceline.data.rows import read_rows

    data = config.data
    files = data.train_files if split == "train" else data.val_files
    if split == "val" and not files:
        return "none (data.val_files is empty: no validation)"
    # Before the tokenizer: a missing file or column is reported even without a model.
    read_rows(local_files(files, split), [data.prompt_key, data.ground_truth_key, *data.extra_keys])
    model = local_model(config.model, "controller")
    tokenizer = load_tokenizer(model.tokenizer_path or model.path)
    prompts = PromptSet.load(data, tokenizer, split=split)
    kept, batch = len(prompts.prompts), data.train_batch_size
    if split == "train" and kept < batch:
        raise DataError(
            f"{kept} training prompts do not fill one batch of data.train_batch_size={batch}; lower it or "
            "add prompts"
        )
    longest = max(len(prompt.token_ids) for prompt in prompts.prompts.values())
    return f"{kept} kept, {prompts.num_filtered} left out as too long, the longest has {longest} tokens"


def _rewards(config: RunConfig) -> str:
    from paceline.reward.functions import registry

    for function in config.reward.functions:
        registry.load(function.name, function.kwargs)
    check_extra_keys(config.data.extra_keys)
    return ", ".join(function.name for function in config.reward.functions) or "none"


def _policy_loss(config: RunConfig) -> str:
    loss = config.actor.policy_loss
    if not isinstance(loss, CustomLoss):
        return loss.type
    _learner_check(config)
    return f"{loss.path}, called on two short sequences"


def _self_test(config: RunConfig) -> str:
    # Needs config.json only, which this machine has where it has the controller.
    model = local_model(config.model, "controller")
    return _learner_check(config.model_copy(update={"model": model}), "--self-test")


def _learner_check(config: RunConfig, *options: str) -> str:
    """The line that `paceline.learner.check` prints.

    It runs in another process, as it imports torch and may run the user's module.

    Raises:
        ConfigError, ModelError: with its reason, if it finds a fault.
    """
    with tempfile.NamedTemporaryFile("w", suffix=".yaml", encoding="utf-8") as file:
        file.write(dump_yaml(config))
        file.flush()
        command = [sys.executable, "-m", "paceline.learner.check", *options, file.name]
        fault = ModelError if "--self-test" in options else ConfigError
        try:
            process = subprocess.run(
                command, capture_output=True, text=True, timeout=_LEARNER_CHECK_S, check=False
            )
        except subprocess.TimeoutExpired:
            what = "the self-test" if "--self-test" in options else "the loss"
            raise fault(
                f"{what} gave no answer within {_LEARNER_CHECK_S:.0f} s: this machine is too busy, or "
                f"{'the model' if '--self-test' in options else 'actor.policy_loss'} hangs; look at "
                f"`{' '.join(['python', *command[1:-1], 'CONFIG'])}`"
            ) from None
    if process.returncode:
        raise fault(process.stderr.rpartition("fatal: ")[2].strip())
    return process.stdout.strip()


def _episodes(config: RunConfig) -> str:
    from paceline.rollout.episodes.check import check_episodes

    return check_episodes(config)


def _reward_services(config: RunConfig) -> str:
    """Whether somebody listens where the remote scorers are said to be."""
    for number, service in enumerate(config.reward.services):
        key = f"reward.services.{number}.address"
        try:
            socket.create_connection(split(service.address), timeout=_REACH_S).close()
        except OSError as error:
            reason = error.strerror or str(error) or type(error).__name__
            raise EnvironmentLackError(
                f"nobody answers at {key}={service.address}, the reward service {service.name!r} ({reason}); "
                "start it before the run, or correct the address"
            ) from error
    names = [f"{service.name} at {service.address}" for service in config.reward.services]
    return ", ".join(names) or "none"


def _devices(config: RunConfig) -> str:
    """Who gets which device of this machine."""
    machine = Machine.here()
    learner, rollout = _require_gpus(config, machine)
    if not learner:
        return f"CPU, {machine.num_cores} cores"
    return f"learner on GPUs {list(learner)}, rollout on {[list(gpus) for gpus in rollout]}"


def _require_gpus(config: RunConfig, machine: Machine) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
    """The learner's GPUs and those of each rollout server, all of which exist."""
    learner, rollout = share_gpus(config, machine.gpus)
    absent = sorted({*learner, *(gpu for gpus in rollout for gpu in gpus)} - set(machine.gpus))
    if absent:
        raise EnvironmentLackError(
            f"there are no GPUs {', '.join(map(str, absent))} here (found: {list(machine.gpus) or 'none'}); "
            "correct learner.devices and rollout.devices, or set learner.device: cpu"
        )
    return learner, rollout


def _trackers(config: RunConfig) -> str:
    check_installed(config.trainer.loggers)
    return ", ".join(config.trainer.loggers) or "none"


def _memory(config: RunConfig) -> str:
    """The memory plan of this machine's GPUs."""
    try:
        learner, rollout = share_gpus(config, Machine.here().gpus)
    except ConfigError:
        return "not planned, as the devices have a fault"
    if not learner:
        return "CPU, nothing to plan"
    return _memory_plan(config, learner, tuple(gpu for gpus in rollout for gpu in gpus), gpu_memory())


def _memory_elsewhere(config: RunConfig) -> str:
    """The learner's part of the plan: nothing is known of the GPUs."""
    return "CPU, nothing to plan" if config.learner.device == "cpu" else _memory_plan(config, (), (), {})


def _memory_plan(
    config: RunConfig, learner: Sequence[int], engines: Sequence[int], totals: Mapping[int, int]
) -> str:
    shape = ModelShape.of(_model_config(config))
    if shape is None:
        return "not planned: config.json names its sizes otherwise"
    plan = MemoryPlan.of(config, shape, learner_gpus=learner, engine_gpus=engines, totals=totals)
    return "\n      ".join(["the most that each phase takes (an estimate)", *plan.lines()])


# Name and check of each part; a check returns a line of facts or raises a PacelineError.
PARTS: tuple[tuple[str, Callable[[RunConfig], str]], ...] = (
    ("model", _model),
    ("self-test", _self_test),
    ("tokenizer", _tokenizer),
    ("training prompts", lambda config: _prompts(config, "train")),
    ("validation prompts", lambda config: _prompts(config, "val")),
    ("reward functions", _rewards),
    ("episodes", _episodes),
    ("policy loss", _policy_loss),
    ("engine", _engine),
)

# Those of this machine, where the run is to start.
PARTS_HERE: tuple[tuple[str, Callable[[RunConfig], str]], ...] = (
    ("devices", _devices),
    ("reward services", _reward_services),
    ("memory", _memory),
    ("trackers", _trackers),
)

# In their place where the run is to start on another machine.
PARTS_ELSEWHERE: tuple[tuple[str, Callable[[RunConfig], str]], ...] = (("memory", _memory_elsewhere),)
