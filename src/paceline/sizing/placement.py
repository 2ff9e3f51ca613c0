"""Fills in what a configuration leaves open, from model and machine: data type, memory, GPUs.

What a file names stays as it is, so that a configuration that names everything means the same everywhere.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from paceline.config.memory import MemoryConfig
from paceline.config.model import ModelConfig
from paceline.config.run import RunConfig
from paceline.core.errors import ConfigError
from paceline.models.model_shape import ModelShape
from paceline.service.observability.gpu_metrics import gpu_memory
from paceline.sizing.colocation import (
    SHARED_MEMORY,
    engine_size,
    settle_colocated,
    with_layout,
    with_shared_memory,
)
from paceline.sizing.gpus import gpus_to_share, share_gpus
from paceline.sizing.machine import Machine
from paceline.sizing.memory_choice import LEAST, UpdateChoice, choose_update
from paceline.sizing.memory_plan import MemoryPlan
from paceline.storage.models import local_model


@dataclass(frozen=True, kw_only=True, slots=True)
class Settled:
    """A configuration in which nothing is left open, and what people should know of the choices."""

    config: RunConfig
    remarks: tuple[str, ...]


def settle(config: RunConfig, machine: Machine) -> Settled:
    """The configuration as `paceline train` runs it on this machine."""
    on_gpus = config.learner.device != "cpu" and bool(machine.gpus)
    model, words = settle_model(config.model, on_gpus=on_gpus)
    config = config.model_copy(update={"model": model})
    remarks = [words] if words else []
    if machine.num_unusable_gpus and config.learner.device == "auto":
        remarks.append(
            f"{machine.num_unusable_gpus} GPUs are here, but torch is the CPU build: everything runs on the "
            "CPU (`paceline doctor`)"
        )
    gpus = gpus_to_share(config, machine.gpus)
    if config.placement == "colocated":
        config = settle_colocated(config, gpus if on_gpus else (), _model_tree(config.model))
    elif on_gpus and config.placement != "given":
        config = _in_turns(config, gpus, machine) or _on_gpus(config, gpus)
    if on_gpus:
        config, chosen = _with_update(config, machine)
        remarks += chosen
    return Settled(config=config, remarks=(*remarks, _layout(config, machine, on_gpus=on_gpus)))


def _with_update(config: RunConfig, machine: Machine) -> tuple[RunConfig, list[str]]:
    """What an update keeps and how large its micro-batches are, and in words what was chosen of them."""
    actor = config.actor
    chosen = _update_choice(config, machine)
    words = []
    if chosen.num_tokens != actor.ppo_max_token_len_per_gpu:
        words.append(f"actor.ppo_max_token_len_per_gpu={chosen.num_tokens}")
        actor = actor.model_copy(update={"ppo_max_token_len_per_gpu": chosen.num_tokens})
        config = config.model_copy(update={"actor": actor})
    if actor.memory.is_open:
        config = with_memory(config, chosen.memory)
        words.append(_words(config.actor.memory))
    return config, words


def _update_choice(config: RunConfig, machine: Machine) -> UpdateChoice:
    try:
        learner, engines = share_gpus(config, machine.gpus)
    except ConfigError:  # the checks say what is wrong with the devices
        return UpdateChoice(
            memory=config.actor.memory.with_rest_of(LEAST), num_tokens=config.actor.ppo_max_token_len_per_gpu
        )
    return choose_update(
        config,
        ModelShape.of(_model_tree(config.model)),
        learner_gpus=learner,
        engine_gpus=[gpu for gpus in engines for gpu in gpus],
        totals=gpu_memory(),
        host_bytes=psutil.virtual_memory().available,
    )


def with_memory(config: RunConfig, memory: MemoryConfig) -> RunConfig:
    """The configuration with this `actor.memory`."""
    return config.model_copy(update={"actor": config.actor.model_copy(update={"memory": memory})})


def _words(memory: MemoryConfig) -> str:
    return "actor.memory: " + ", ".join(
        f"{name}={str(value).lower()}" for name, value in memory.model_dump().items()
    )


def settle_model(model: ModelConfig, *, on_gpus: bool) -> tuple[ModelConfig, str]:
    """The section, with what the file leaves out chosen by device and weights; the choices in words."""
    chosen: dict[str, Any] = {}
    if "dtype" not in model.model_fields_set:
        stored = _model_tree(model)
        is_float32 = stored.get("dtype", stored.get("torch_dtype")) == "float32"
        chosen["dtype"] = "bfloat16" if on_gpus and not is_float32 else "float32"
    other = {key: value for key, value in chosen.items() if value != getattr(model, key)}
    words = [f"model.{key}={str(value).lower()}" for key, value in other.items()]
    return model.model_copy(update=chosen), ", ".join(words)


def _model_tree(model: ModelConfig) -> Mapping[str, Any]:
    folder = Path(local_model(model, "controller").path)
    try:
        tree = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}  # the checks say what is wrong with it
    return tree if isinstance(tree, dict) else {}


def _in_turns(config: RunConfig, gpus: tuple[int, ...], machine: Machine) -> RunConfig | None:
    """Learner and engines on all GPUs, taking turns; None where the file says or needs something else.

    Strictly on policy each side waits for the other, so GPUs that are divided among them are idle for half of
    the time: 3B on two H100s took 30.4 s a step divided and 17.0 s in turns.
    """
    learner, rollout = config.learner, config.rollout
    if config.placement != "auto" or config.barrier.work_ahead != "off":
        return None
    if (
        learner.devices is not None
        or rollout.devices is not None
        or config.weights.backend not in ("auto", "shared")
    ):
        return None
    if "world_size" in learner.model_fields_set or "replicas" in rollout.model_fields_set:
        return None
    tree, totals = _model_tree(config.model), gpu_memory()
    shape = ModelShape.of(tree)
    if shape is None or any(gpu not in totals for gpu in gpus):
        return None
    settled = settle_colocated(config.model_copy(update={"placement": "colocated"}), gpus, tree)
    tried, _ = _with_update(settled, machine)
    engines = settled.rollout.devices or ()
    plan = MemoryPlan.of(tried, shape, learner_gpus=gpus, engine_gpus=engines, totals=totals)
    return settled if plan.fits else None


def _on_gpus(config: RunConfig, gpus: tuple[int, ...]) -> RunConfig:
    """Learner ranks and rollout servers over all GPUs, unless the file says how many of which."""
    learner, rollout = config.learner, config.rollout
    if learner.devices is not None or rollout.devices is not None:
        return config
    fits = config.placement == "fit"
    per_engine = rollout.tensor_model_parallel_size
    ranks = learner.world_size if "world_size" in learner.model_fields_set else None
    servers = rollout.replicas if "replicas" in rollout.model_fields_set else None
    if "tensor_model_parallel_size" not in rollout.model_fields_set:
        per_engine = engine_size(config, len(gpus), _model_tree(config.model))
    if fits and (ranks or 1) + (servers or 1) * per_engine > len(gpus):
        ranks, servers = None if len(gpus) > 1 else 1, 1
    if len(gpus) == 1 and ranks in (None, 1) and servers in (None, 1) and per_engine == 1:
        return _on_one_gpu(config, gpus[0])
    if servers is None:
        left = len(gpus) - (ranks if ranks is not None else len(gpus) // 2)
        servers = max(1, left // per_engine)
    if ranks is None:
        ranks = max(1, len(gpus) - servers * per_engine)
    return with_layout(
        config,
        learner={"world_size": ranks},
        rollout={"replicas": servers, "tensor_model_parallel_size": per_engine},
    )


def _on_one_gpu(config: RunConfig, gpu: int) -> RunConfig:
    rollout: dict[str, Any] = {"replicas": 1, "devices": (gpu,)}
    if "gpu_memory_utilization" not in config.rollout.model_fields_set:
        rollout["gpu_memory_utilization"] = SHARED_MEMORY
    config = with_shared_memory(config)
    return with_layout(config, learner={"world_size": 1, "devices": (gpu,)}, rollout=rollout)


def _layout(config: RunConfig, machine: Machine, *, on_gpus: bool) -> str:
    ranks, servers = config.learner.world_size, config.rollout.replicas
    size = config.rollout.tensor_model_parallel_size
    engines = _many(servers, "rollout server") + (f" of {_many(size, 'GPU')}" if size > 1 else "")
    if not on_gpus:
        return (
            f"layout: {_many(ranks, 'learner rank')} and {engines} on {_many(machine.num_cores, 'CPU core')}"
        )
    if config.learner.devices is not None and config.learner.devices == config.rollout.devices:
        turns = ", in turns" if config.rollout.sleep == "always" else ""
        return f"layout: learner and {engines} share GPUs {list(config.learner.devices)}{turns}"
    used = ranks + servers * size
    idle = len(gpus_to_share(config, machine.gpus)) - used
    words = f"layout: {_many(ranks, 'learner rank')} and {engines} on {_many(used, 'GPU')}"
    return words + (f"; {_many(idle, 'GPU')} without work" if idle > 0 else "")


def _many(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
