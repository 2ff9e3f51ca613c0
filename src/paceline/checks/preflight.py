"""Checks configuration, model, data and reward before a run starts anything."""

from __future__ import annotations

import fnmatch
import importlib.util
import json
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from paceline.checks.service_checks import (
    check_algorithm,
    engine_log_probs,
    self_test,
    try_dataflow,
    with_local_models,
)
from paceline.config.model import ModelConfig
from paceline.config.run import RunConfig
from paceline.config.training.policy_losses import CustomLoss
from paceline.core.errors import ConfigError, DataError, EnvironmentLackError, ModelError
from paceline.core.user_functions.reward_function import check_extra_keys
from paceline.engines.registry import engine_facts
from paceline.models.facts import family_of
from paceline.models.model_shape import ModelShape
from paceline.service.addresses import split
from paceline.show.trackers.adapters import check_installed
from paceline.sizing.gpus import share_gpus
from paceline.sizing.machine import Machine
from paceline.sizing.memory.memory_plan import MemoryPlan
from paceline.storage.folder import Folder, is_url
from paceline.storage.hub import is_named
from paceline.storage.models import local_model

_REACH_S = 3.0
# An environment that is started beside the run imports first.
_PATIENCE_S = 10.0
_PAUSE_S = 0.2
_PACKAGES = ("torch", "transformers", "safetensors", "pyarrow", "aiohttp")
_WEIGHTS = ("*.safetensors", "model.safetensors.index.json")


def quick_check(config: RunConfig, *, here: bool = True) -> None:
    """Runs those checks of `paceline check` that take no time, before `paceline train` creates anything.

    It loads no tokenizer, unless a frozen network's has to be compared: data and prompts are the controller's
    to check.

    Args:
        here: the run's services start on this machine, whose GPUs and network are looked at.

    Raises:
        PacelineError: one of GIVEN_ERRORS; the first fault.
    """
    if here:
        require_packages(config)
    _engine(config)
    _data_files(config)
    _model(config)
    check_installed(config.trainer.loggers)
    if here:
        _networks(config)
        _reward_models(config)
        _devices(config)
        _reward_services(config)
        _environment(config)


def require_packages(config: RunConfig, *, engine: bool = True) -> None:
    """Whether the packages are installed that the services import; imports none of them.

    Args:
        engine: the engine's, too, which is on the rollout servers' hosts alone.

    Raises:
        ConfigError: there is no engine of this name.
        EnvironmentLackError: one or more are not; the wheel without extras is installed like that.
    """
    facts = engine_facts(config.rollout.name) if engine else None
    named = [*_PACKAGES, *([facts.package] if facts else [])]
    lacking = [name for name in named if importlib.util.find_spec(name) is None]
    if lacking:
        raise EnvironmentLackError(
            f"not installed in this environment: {', '.join(lacking)}; `make venv` in a clone installs all, "
            "a wheel needs its extra cpu or cuda (docs/install.md)"
        )
    if facts and (library := facts.lacking_library):
        raise EnvironmentLackError(
            f"{facts.title}'s build for CPUs loads {library.file}, which is not here: {library.remedy}"
        )


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
    actor = config.actor
    if actor.aggregation != "seq-mean-token-mean" == actor.policy_loss.aggregation:
        words.append(
            f"actor.loss_agg_mode={actor.aggregation} weights sequences by their lengths; the paper of "
            f"{actor.policy_loss.type} does not, nor does verl, whatever its loss_agg_mode says; leave the "
            "key out for seq-mean-token-mean"
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
            remedy = _how_to_make(file) or "correct data.train_files or data.val_files"
            raise DataError(f"data file {file} does not exist; {remedy}")


def _how_to_make(path: Path) -> str:
    """The command that makes an input of the demo, which the recipes use too; "" for any other path."""
    made = (Path("examples/arithmetic") / name for name in ("data", "model", "start"))
    return "`make demo-start` makes it" if any(path.is_relative_to(folder) for folder in made) else ""


def _engine(config: RunConfig) -> str:
    from paceline.rollout.engines.loading import check_engine

    check_engine(config)
    return config.rollout.name


def _model_config(config: RunConfig) -> dict[str, Any]:
    """The model's config.json.

    Raises:
        ModelError: no such folder, no readable config.json, or no weights.
    """
    folder = Path(local_model(config.model, "controller").path)
    if not folder.is_dir():
        remedy = _how_to_make(folder) or "set model.path to a folder in the Hugging Face layout"
        raise ModelError(f"model folder {folder} does not exist; {remedy}")
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
        return _holds_weights(model.path)
    names = Folder.at(model.path).names()
    return any(fnmatch.fnmatch(name, pattern) for name in names for pattern in _WEIGHTS)


def _holds_weights(folder: str) -> bool:
    return any(any(Path(folder).glob(name)) for name in _WEIGHTS)


def _model(config: RunConfig) -> str:
    tree = _model_config(config)
    text = tree | (tree.get("text_config") or {})  # beside a vision tower
    longest = text.get("max_position_embeddings")
    if isinstance(longest, int) and config.max_model_len > longest:
        raise ModelError(
            f"data.max_prompt_length + data.max_response_length = {config.max_model_len} exceed the model's "
            f"max_position_embeddings={longest}; lower them"
        )
    heads, ranks = text.get("num_attention_heads"), config.rollout.tensor_model_parallel_size
    if isinstance(heads, int) and heads % ranks:
        raise ConfigError(
            f"rollout.tensor_model_parallel_size={ranks} must divide the model's {heads} attention heads"
        )
    _experts(config, text)
    _room_for_adapters(config, tree)
    _critic_of_images(config)
    architecture = ", ".join(tree.get("architectures") or [str(tree.get("model_type"))])
    return f"{config.model.path}: {architecture}, up to {longest} tokens"


def _experts(config: RunConfig, text: Mapping[str, Any]) -> None:
    """Whether the model has experts where their load is to be balanced; their number has several names."""
    has_experts = any("experts" in key and value for key, value in text.items())
    config.actor.require_experts(config.model.path, has_experts=has_experts)


def _room_for_adapters(config: RunConfig, tree: Mapping[str, Any]) -> None:
    """Whether adapters have room in the layers whose shapes config.json gives; the learner looks at all."""
    lora, shape = config.model.lora, ModelShape.of(tree)
    if lora is not None and shape is not None:
        for layer, inputs, outputs in shape.matrices(lora.targets):
            lora.require_room(layer, inputs, outputs)


def _critic_of_images(config: RunConfig) -> None:
    """A critic of its own folder has to see the images, too."""
    folder = config.critic.path
    if config.data.image_key is None or "critic" not in config.needs or not folder or is_named(folder):
        return
    try:
        kind = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8")).get("model_type")
    except (OSError, ValueError, AttributeError):
        return  # the self-test says what is wrong with it
    if not family_of(kind).takes_images:
        raise ModelError(
            f"critic.path={folder} ({kind}) takes no images, and data.image_key={config.data.image_key} "
            "gives some: leave it out, so that the critic begins as the policy, or name such a model"
        )


def _tokenizer(config: RunConfig) -> str:
    from paceline.data.prompts import load_tokenizer, stop_token_ids

    model = local_model(config.model, "controller")
    folder = model.tokenizer_path or model.path
    tokenizer = load_tokenizer(folder)
    stops = ", ".join(map(str, stop_token_ids(model.path, tokenizer)))
    return f"{folder}: responses end at token {stops}"


def _networks(config: RunConfig) -> str:
    from paceline.data.frozen_networks import check_frozen_networks

    for name, network in config.algorithm.networks.items():
        here = is_named(network.path) or is_url(network.path)
        if not here and config.model.load_format == "auto" and not _holds_weights(network.path):
            raise ModelError(
                f"algorithm.networks.{name}.path={network.path} has no weights (*.safetensors); name the "
                "folder of a model, say one that `paceline export` wrote"
            )
    return check_frozen_networks(with_local_models(config)) if config.algorithm.networks else "none"


def _prompts(config: RunConfig, split: str) -> str:
    from paceline.checks.example import first_prompt
    from paceline.data.hub import local_files
    from paceline.data.images import ImageReader
    from paceline.data.prompts import PromptSet, load_tokenizer
    from paceline.data.rows import read_rows

    data = config.data
    files = data.train_files if split == "train" else data.val_files
    if not files and not data.train_files and config.rollout.environment is not None:
        return f"the environment at {config.rollout.environment.address} is asked for them by the run"
    if split == "val" and not files:
        return "none (data.val_files is empty: no validation)"
    # Before the tokenizer: a missing file or column is reported even without a model.
    read_rows(local_files(files, split), [data.prompt_key, data.ground_truth_key, *data.extra_keys])
    model = local_model(config.model, "controller")
    tokenizer = load_tokenizer(model.tokenizer_path or model.path)
    reader = ImageReader.load(data, model.path)
    prompts = PromptSet.load(data, tokenizer, split=split, images=reader)
    kept, batch = len(prompts.prompts), data.train_batch_size
    if split == "train" and kept < batch:
        raise DataError(
            f"{kept} training prompts do not fill one batch of data.train_batch_size={batch}; lower it, and "
            "actor.ppo_mini_batch_size with it, or add prompts"
        )
    if split == "train":
        prompts.check_token_budget(config)
    longest = max(len(prompt.token_ids) for prompt in prompts.prompts.values())
    facts = f"{kept} kept, {prompts.num_filtered} left out as too long, the longest has {longest} tokens"
    if images := [image for prompt in prompts.prompts.values() for image in prompt.images]:
        most = max(image.num_tokens for image in images)
        facts += f"; {len(images)} images of at most {most} tokens"
    if split == "val":
        return facts
    shown = first_prompt(prompts, tokenizer, None if reader is None else reader.image_token_id)
    return f"{facts}\n      the first: {shown}"


def _rewards(config: RunConfig) -> str:
    from paceline.reward.functions import registry

    for function in config.reward.functions:
        registry.load(function.name, function.kwargs, group=function.group)
    check_extra_keys(config.data.extra_keys)
    names = ", ".join(function.name for function in config.reward.functions) or "none"
    return "\n      ".join(filter(None, (names, _example_reward(config))))


def _example_reward(config: RunConfig) -> str:
    from paceline.checks.example import example_reward

    try:
        return example_reward(config)
    except DataError:
        return ""  # the part of the prompts says what is wrong with them


def _reward_models(config: RunConfig) -> str:
    for number, model in enumerate(config.reward.models):
        if not (Path(model.path) / "config.json").is_file():
            raise ModelError(
                f"reward.models.{number}.path={model.path} is not a model folder (no config.json); correct it"
            )
        if model.prompt_file is not None:
            _check_question(model.prompt_file, model.pattern)
    return ", ".join(f"{model.name} in {model.path}" for model in config.reward.models) or "none"


def _check_question(prompt_file: str, pattern: str) -> None:
    """Whether a judge's prompt file shows the response, and its pattern has a group."""
    from paceline.reward.judge.question import GradePattern, JudgePrompt, read_prompt_file

    JudgePrompt(read_prompt_file(prompt_file))
    GradePattern(pattern, {})


def _algorithm(config: RunConfig) -> str:
    loss, algorithm = config.actor.policy_loss, config.algorithm
    own = [loss.path] if isinstance(loss, CustomLoss) else []
    own += [algorithm.name] if algorithm.is_own else []
    if not own:
        return f"{algorithm.name}, {loss.type}"
    check_algorithm(config)
    return f"{', '.join(own)}, called on a few short sequences"


def _dataflow(config: RunConfig) -> str:
    return try_dataflow(config) if config.trainer.dataflow is not None else "built-in"


def _episodes(config: RunConfig) -> str:
    from paceline.rollout.episodes.check import check_episodes

    return check_episodes(config)


def _reward_services(config: RunConfig) -> str:
    """Whether somebody listens where the remote scorers are said to be; what judges are asked."""
    for judge in config.reward.judges:
        _check_question(judge.prompt_file, judge.pattern)
    for number, service in enumerate(config.reward.services):
        key = f"reward.services.{number}.address"
        _reach(key, service.address, f"the reward service {service.name!r}", "start it")
    names = [f"{service.name} at {service.address}" for service in config.reward.services]
    return ", ".join(names) or "none"


def _environment(config: RunConfig) -> str:
    """Whether an environment of this contract answers where one is said to be."""
    service = config.rollout.environment
    if service is None:
        return "none"
    if service.address is None:
        return f"{service.attached}, which attaches to the rollout servers of the run"
    remedy = "start it (serve_environment)"
    key = "rollout.environment.address"
    _reach(key, service.address, "the environment", remedy, patience_s=_PATIENCE_S)
    from paceline.rollout.episodes.check import check_environment

    return check_environment(config)


def _reach(key: str, address: str, what: str, remedy: str, *, patience_s: float = 0.0) -> None:
    """Raises EnvironmentLackError if nobody has listened at an address for `patience_s`."""
    until = time.monotonic() + patience_s
    while True:
        try:
            return socket.create_connection(split(address), timeout=_REACH_S).close()
        except OSError as error:
            if time.monotonic() < until:
                time.sleep(_PAUSE_S)
                continue
            reason = error.strerror or str(error) or type(error).__name__
            raise EnvironmentLackError(
                f"nobody answers at {key}={address}, {what} ({reason}); {remedy} before the run, or correct "
                "the address"
            ) from error


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
    wanted = {*learner, *(gpu for gpus in rollout for gpu in gpus), *config.reward.model_gpus}
    absent = sorted(wanted - set(machine.gpus))
    if absent:
        raise EnvironmentLackError(
            f"there are no GPUs {', '.join(map(str, absent))} here (found: {list(machine.gpus) or 'none'}); "
            "correct learner.devices, rollout.devices and reward.models, or set learner.device: cpu"
        )
    return learner, rollout


def _trackers(config: RunConfig) -> str:
    check_installed(config.trainer.loggers)
    return ", ".join(config.trainer.loggers) or "none"


def _memory(config: RunConfig) -> str:
    """The memory plan of this machine's GPUs."""
    machine = Machine.here()
    try:
        learner, rollout = share_gpus(config, machine.gpus)
    except ConfigError:
        return "not planned, as the devices have a fault"
    if not learner:
        return "CPU, nothing to plan"
    engines = tuple(gpu for gpus in rollout for gpu in gpus)
    return _memory_plan(config, learner, engines, machine.gpu_bytes)


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


@dataclass(frozen=True, kw_only=True, slots=True)
class PreflightCheck:
    """A part of `paceline check`."""

    name: str
    check: Callable[[RunConfig], str]
    """Returns a line of facts; raises a PacelineError that says what is wrong."""
    wait: str = ""
    """What takes seconds; said before the check."""


def parts(*, here: bool, tests: Path | None) -> list[PreflightCheck]:
    """What `paceline check` looks at, in order.

    Args:
        here: the run is to start on this machine.
        tests: an empty folder for what the tests of the model leave to each other; None: no such tests.
    """
    chosen = [
        PreflightCheck(name="model", check=_model),
        PreflightCheck(name="frozen networks", check=_networks),
    ]
    if tests is not None:
        wait = "packed log-probs of a small model of this kind against transformers', some 5 s"
        chosen.append(PreflightCheck(name="self-test", check=partial(self_test, kept=tests), wait=wait))
    chosen += [
        PreflightCheck(name=name, check=check) for name, check in (*_PARTS, *(_HERE if here else _ELSEWHERE))
    ]
    if tests is not None and here:
        wait = "the engine scores the same rows, some 15 s"
        chosen.append(
            PreflightCheck(name="engine's log-probs", check=partial(engine_log_probs, kept=tests), wait=wait)
        )
    return chosen


_PARTS: tuple[tuple[str, Callable[[RunConfig], str]], ...] = (
    ("tokenizer", _tokenizer),
    ("training prompts", lambda config: _prompts(config, "train")),
    ("validation prompts", lambda config: _prompts(config, "val")),
    ("reward functions", _rewards),
    ("episodes", _episodes),
    ("algorithm", _algorithm),
    ("dataflow", _dataflow),
    ("engine", _engine),
)

# Those of this machine, where the run is to start.
_HERE: tuple[tuple[str, Callable[[RunConfig], str]], ...] = (
    ("devices", _devices),
    ("reward models", _reward_models),
    ("reward services", _reward_services),
    ("environment", _environment),
    ("memory", _memory),
    ("trackers", _trackers),
)

# In their place where the run is to start on another machine.
_ELSEWHERE: tuple[tuple[str, Callable[[RunConfig], str]], ...] = (("memory", _memory_elsewhere),)
