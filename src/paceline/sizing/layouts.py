"""Lists the layouts of learner and engines on GPUs, estimates their step times, and chooses the best."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from paceline.config.load import parse
from paceline.config.run import RunConfig
from paceline.core.errors import ConfigError
from paceline.models.model_shape import ModelShape
from paceline.sizing.colocation import (
    SHARED_MEMORY,
    engine_size,
    settle_colocated,
    with_fair_share,
    with_shared_memory,
)
from paceline.sizing.gpus import gpus_to_share, share_gpus
from paceline.sizing.machine import Machine
from paceline.sizing.memory.memory_plan import MemoryPlan
from paceline.sizing.model_files import model_tree
from paceline.sizing.step_time import StepTime
from paceline.sizing.update import settle_update

# Layouts whose estimates differ by less than this share count as equal; then the usual one is taken.
_CLEARLY: Final = 0.9


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """A layout of a run on a machine's GPUs.

    Attributes:
        config: configuration with ranks, engines and their GPUs; memory settings are as in the file.
        settled: the same configuration with nothing left open.
        refusal: why the layout does not fit a GPU's memory; "" if it fits, or if nothing is known.
        time: the estimate of a step; None if GPUs or the model's shape are unknown.
    """

    config: RunConfig
    settled: RunConfig
    refusal: str
    time: StepTime | None

    @property
    def words(self) -> str:
        """Describes the layout in words."""
        learner, rollout = self.settled.learner, self.settled.rollout
        size = rollout.tensor_model_parallel_size
        engines = many(rollout.replicas, "engine") + (f" of {many(size, 'GPU')}" if size > 1 else "")
        sides = f"{many(learner.world_size, 'learner rank')}, {engines}"
        if learner.devices is None or learner.devices != rollout.devices:
            return sides
        return f"{sides} {'in turns' if rollout.sleep == 'always' else 'side by side'} on the same GPUs"

    @property
    def _order(self) -> tuple[bool, float]:
        return bool(self.refusal), self.time.seconds if self.time is not None else 0.0


def layouts(config: RunConfig, machine: Machine, **tokens: int | None) -> list[Layout]:
    """Returns the layouts that a run may have on a machine's GPUs: those that fit first, the fastest first.

    If the file assigns the GPUs, there is only that layout.

    Args:
        tokens: `prompt_tokens` and `response_tokens` of `StepTime.of`.

    Raises:
        ConfigError: the file asks for more GPUs than there are.
    """
    gpus = gpus_to_share(config, machine.gpus)
    choices = list(_choices(config, gpus, machine)) if _is_free(config) else [_given(config, gpus, machine)]
    # Two choices can give the same layout, because with adapters engines stay awake even in turns.
    distinct: dict[Any, Layout] = {}
    for choice in choices:
        layout = _weighed(choice, machine, tokens)
        distinct.setdefault((layout.words, layout._order), layout)
    return sorted(distinct.values(), key=lambda layout: layout._order)


def choose_layout(config: RunConfig, machine: Machine) -> RunConfig:
    """Returns the configuration with the layout that is expected to be the fastest of those that fit.

    Usually learner and engines are on all GPUs and take turns. Strictly on policy, each side waits for the
    other, so GPUs divided between them are idle half of the time: with 3B on two H100s, a step took 30.4 s
    divided and 17.0 s in turns. Another layout is taken if its estimate is at least a tenth lower.

    With a bound on staleness neither side waits, and GPUs are always divided.
    """
    gpus = gpus_to_share(config, machine.gpus)
    if not _is_free(config):
        return _given(config, gpus, machine)
    shape = ModelShape.of(model_tree(config.model))
    if shape is None or any(gpu not in machine.gpu_bytes for gpu in gpus):
        return divided(config, gpus, machine)
    best = layouts(config, machine)[0]
    if config.barrier.bound or (usual := _weighed(_in_turns(config, gpus, machine), machine, {})).refusal:
        return divided(config, gpus, machine) if best.refusal or best.time is None else best.config
    if best.refusal or best.time is None or usual.time is None:
        return usual.config
    return best.config if best.time.seconds < _CLEARLY * usual.time.seconds else usual.config


def faster_with_bound(
    config: RunConfig, machine: Machine, than: StepTime, **tokens: int | None
) -> Layout | None:
    """Returns the best layout of the same run with `barrier.max_staleness: 1`, if it is clearly faster.

    Args:
        than: the estimate of the layout that the run would take.
        tokens: `prompt_tokens` and `response_tokens` of `StepTime.of`.
    """
    if config.barrier.mode == "bounded" or not _is_free(config):
        return None
    tree = config.model_dump(exclude_unset=True)
    tree["barrier"] = tree.get("barrier", {}) | {"mode": "bounded", "max_staleness": 1}
    if config.algorithm.rollout_correction.method == "none":
        tree["algorithm"] = tree["algorithm"] | {"rollout_correction": {}}
    try:
        best = layouts(parse(RunConfig, tree), machine, **tokens)[0]
    except ConfigError:  # the rest of the configuration rules out a bound
        return None
    if best.refusal or best.time is None or not best.time.overlaps:
        return None
    return best if best.time.seconds < _CLEARLY * than.seconds else None


def _is_free(config: RunConfig) -> bool:
    """Returns whether the file leaves the placement on GPUs open."""
    learner, rollout = config.learner, config.rollout
    return (
        config.placement == "auto"
        and config.barrier.work_ahead == "off"
        and learner.devices is None
        and rollout.devices is None
        and config.weights.backend in ("auto", "shared")
        and "world_size" not in learner.model_fields_set
        and "replicas" not in rollout.model_fields_set
    )


def _given(config: RunConfig, gpus: tuple[int, ...], machine: Machine) -> RunConfig:
    if config.placement == "colocated":
        return settle_colocated(config, gpus, machine)
    return config if config.placement == "given" else divided(config, gpus, machine)


def _choices(config: RunConfig, gpus: tuple[int, ...], machine: Machine) -> Iterator[RunConfig]:
    """Yields turns with each engine size that the heads allow; then each division of the GPUs.

    With a bound on staleness there are no turns.
    """
    if not config.barrier.bound:
        yield _in_turns(config, gpus, machine)
        for size in _engine_sizes(config, len(gpus)):
            sized = config.changed(rollout={"tensor_model_parallel_size": size})
            yield _in_turns(sized, gpus, machine)
    if len(gpus) == 1:
        yield divided(config, gpus, machine)
    for ranks in range(1, len(gpus)):
        yield divided(config.changed(learner={"world_size": ranks}), gpus, machine)


def _engine_sizes(config: RunConfig, num_gpus: int) -> list[int]:
    tree = model_tree(config.model)
    heads = (tree.get("text_config") or tree).get("num_attention_heads")
    if "tensor_model_parallel_size" in config.rollout.model_fields_set or not isinstance(heads, int):
        return []
    return [
        size for size in range(1, num_gpus + 1) if not (num_gpus % size or heads % size or size & (size - 1))
    ]


def _weighed(config: RunConfig, machine: Machine, tokens: Mapping[str, int | None]) -> Layout:
    if config.budget_refusal:
        return Layout(config=config, settled=config, refusal=config.budget_refusal, time=None)
    settled, _ = settle_update(config, machine)
    shape = ModelShape.of(model_tree(config.model))
    if shape is None:
        return Layout(config=config, settled=settled, refusal="", time=None)
    learner, engines = share_gpus(settled, machine.gpus)
    plan = MemoryPlan.of(
        settled,
        shape,
        learner_gpus=learner,
        engine_gpus=[gpu for gpus in engines for gpu in gpus],
        totals=machine.gpu_bytes,
        host_bytes=machine.host_bytes,
    )
    time = None if machine.card is None else StepTime.of(settled, shape, machine.card, **tokens)
    return Layout(config=config, settled=settled, refusal=plan.refusal, time=time)


def _in_turns(config: RunConfig, gpus: tuple[int, ...], machine: Machine) -> RunConfig:
    colocated = config.model_copy(update={"placement": "colocated"})
    return settle_colocated(colocated, gpus, machine)


def divided(config: RunConfig, gpus: tuple[int, ...], machine: Machine) -> RunConfig:
    """Spreads learner ranks and rollout servers over all GPUs, unless the file gives their numbers."""
    learner, rollout = config.learner, config.rollout
    if learner.devices is not None or rollout.devices is not None:
        return config
    fits = config.placement == "fit"
    per_engine = rollout.tensor_model_parallel_size
    ranks = learner.world_size if "world_size" in learner.model_fields_set else None
    servers = rollout.replicas if "replicas" in rollout.model_fields_set else None
    if "tensor_model_parallel_size" not in rollout.model_fields_set:
        per_engine = engine_size(config, len(gpus), model_tree(config.model), machine.gpu_bytes)
    if fits and (ranks or 1) + (servers or 1) * per_engine > len(gpus):
        ranks, servers = None if len(gpus) > 1 else 1, 1
    if len(gpus) == 1 and ranks in (None, 1) and servers in (None, 1) and per_engine == 1:
        return _on_one_gpu(config, gpus[0])
    if servers is None:
        left = len(gpus) - (ranks if ranks is not None else len(gpus) // 2)
        servers = max(1, left // per_engine)
    if ranks is None:
        ranks = max(1, len(gpus) - servers * per_engine)
    return with_fair_share(
        config.changed(
            learner={"world_size": ranks},
            rollout={"replicas": servers, "tensor_model_parallel_size": per_engine},
        )
    )


def _on_one_gpu(config: RunConfig, gpu: int) -> RunConfig:
    rollout: dict[str, Any] = {"replicas": 1, "devices": (gpu,)}
    if "gpu_memory_utilization" not in config.rollout.model_fields_set:
        rollout["gpu_memory_utilization"] = SHARED_MEMORY
    own = {"world_size": 1, "devices": (gpu,)}
    return with_shared_memory(config).changed(learner=own, rollout=rollout)


def many(count: int, noun: str) -> str:
    """Returns a count with its noun."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
