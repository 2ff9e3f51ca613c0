"""Fills in what a configuration leaves open, from model and machine: data type, memory, GPUs.

Values given in the file stay, so a complete configuration means the same on every machine.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.config.model import ModelConfig
from paceline.config.run import RunConfig
from paceline.sizing.colocation import settle_elsewhere
from paceline.sizing.gpus import gpus_to_share
from paceline.sizing.layouts import choose_layout, many
from paceline.sizing.machine import Machine
from paceline.sizing.model_files import model_tree
from paceline.sizing.update import settle_context, settle_update


@dataclass(frozen=True, kw_only=True, slots=True)
class Settled:
    """A configuration in which nothing is left open, and remarks about the choices."""

    config: RunConfig
    remarks: tuple[str, ...]


def settle(config: RunConfig, machine: Machine) -> Settled:
    """Returns the configuration as `paceline train` runs it on this machine."""
    on_gpus = config.learner.device != "cpu" and bool(machine.gpus)
    model, words = settle_model(config.model, on_gpus=on_gpus)
    config = config.model_copy(update={"model": model})
    remarks = [words] if words else []
    if machine.num_unusable_gpus and config.learner.device == "auto":
        remarks.append(
            f"{machine.num_unusable_gpus} GPUs are here, but torch is the CPU build: everything runs on the "
            "CPU (`paceline doctor`)"
        )
    if on_gpus:
        config, chosen = settle_update(choose_layout(config, machine), machine)
        remarks += chosen
    else:
        config, chosen = settle_context(config)
        remarks += chosen
        if config.placement == "colocated":
            config = settle_elsewhere(config, on_gpus=False)
    return Settled(config=config, remarks=(*remarks, _layout(config, machine, on_gpus=on_gpus)))


def settle_model(model: ModelConfig, *, on_gpus: bool) -> tuple[ModelConfig, str]:
    """Completes the section according to device and weights; returns it and the choices in words."""
    if "dtype" in model.model_fields_set:
        return model, ""
    stored = model_tree(model)
    is_float32 = stored.get("dtype", stored.get("torch_dtype")) == "float32"
    dtype, words = "float32", ""
    if on_gpus and not is_float32:
        dtype, words = "bfloat16", "model.dtype=bfloat16"
    elif on_gpus:
        words = (
            "model.dtype=float32, like the stored weights (on a GPU, model.dtype: bfloat16 is much faster)"
        )
    return model.model_copy(update={"dtype": dtype}), words


def _layout(config: RunConfig, machine: Machine, *, on_gpus: bool) -> str:
    ranks, servers = config.learner.world_size, config.rollout.replicas
    size = config.rollout.tensor_model_parallel_size
    engines = many(servers, "rollout server") + (f" of {many(size, 'GPU')}" if size > 1 else "")
    for name, other in config.rollout.other_engines.items():
        engines += f" ({other.replicas} with {name})" if other.replicas else ""
    if config.validates_beside:
        engines += f" ({config.rollout.validation_servers} for validation)"
    if not on_gpus:
        return f"layout: {many(ranks, 'learner rank')} and {engines} on {many(machine.num_cores, 'CPU core')}"
    if config.learner.devices is not None and config.learner.devices == config.rollout.devices:
        turns = ", in turns" if config.rollout.sleep == "always" else ""
        return f"layout: learner and {engines} share GPUs {list(config.learner.devices)}{turns}"
    used = ranks + servers * size
    idle = len(gpus_to_share(config, machine.gpus)) - used
    words = f"layout: {many(ranks, 'learner rank')} and {engines} on {many(used, 'GPU')}"
    return words + (f"; {many(idle, 'GPU')} without work" if idle > 0 else "")
