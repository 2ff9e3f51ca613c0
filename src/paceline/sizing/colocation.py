"""Plans learner ranks and rollout servers on the same GPUs: how many of each, and whether engines sleep."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from paceline.config.run import RunConfig
from paceline.core.cards import CARDS
from paceline.engines.memory import EngineMemory, engine_budget
from paceline.engines.registry import engine_facts
from paceline.models.model_shape import ModelShape
from paceline.sizing.machine import Machine
from paceline.sizing.memory.learner_memory import LearnerMemory
from paceline.sizing.model_files import model_tree
from paceline.sizing.step_time import StepTime
from paceline.sizing.update import update_choice

SHARED_MEMORY: Final = 0.4
"""Share of a GPU's memory that an engine may take if a learner rank shares the GPU and neither sleeps."""

# Largest share of an engine's memory for weights; the rest is the KV cache.
_WEIGHTS_SHARE: Final = 0.6
# A step is clearly shorter if its estimate is below this share of the other.
_CLEARLY: Final = 0.98
# Assumed size in bytes of a GPU of unknown size.
_USUAL_MEMORY: Final = 80_000_000_000
_MOST_UTILIZATION: Final = 0.85
# Share of a GPU's memory for other processes' contexts and for what the plan does not know.
_MARGIN: Final = 0.04
# Unused blocks of a sequence in the KV cache: its last one is not full, and one is allocated ahead.
_SPARE_TOKENS: Final = 32
# Lower bound of the limit of sequences per server: validations may have more prompts than a small batch.
_LEAST_SEQUENCES: Final = 128


def settle_colocated(config: RunConfig, gpus: Sequence[int], machine: Machine) -> RunConfig:
    """Settles the layout of `placement: colocated`, and whether engines sleep.

    If the file leaves sleep open, engines stay awake in two cases: the best form of the update fits next to
    them, or the best form that fits gives a clearly shorter step than taking turns. Turns cost time, but
    leave the learner all memory.

    Args:
        gpus: GPUs of the machine that both sides may use.
        machine: memory and other facts of these GPUs.
    """
    tree, gpu_bytes = model_tree(config.model), machine.gpu_bytes
    config = with_fair_share(_share_out(with_shared_memory(config), gpus, tree, gpu_bytes))
    shape = ModelShape.of(tree)
    shared = sorted({*(config.learner.devices or ())} & {*(config.rollout.devices or ())})
    totals = [gpu_bytes[gpu] for gpu in shared if gpu in gpu_bytes]
    if shape is None or not totals:
        return _with_safe_memory(config)
    needed = _needed(config, shape, totals)
    awake, turns = (config.changed(rollout={"sleep": word}) for word in ("never", "always"))
    awake = _with_fixed_cache(_with_utilization(awake, min(needed, SHARED_MEMORY)), shape, totals)
    share = min(needed, _beside(turns, shape, totals))
    turns = _with_fixed_cache(_with_utilization(turns, share), shape, totals)
    if config.rollout.sleep != "auto":
        return awake if config.rollout.sleep == "never" else turns
    return awake if _is_better_awake(awake, turns, shape, machine) else turns


def settle_elsewhere(config: RunConfig, *, on_gpus: bool) -> RunConfig:
    """Settles `placement: colocated` for hosts whose GPUs this machine cannot see."""
    config = with_shared_memory(config)
    if on_gpus:
        return _with_safe_memory(config)
    return config.changed(rollout={"sleep": "never"}) if config.rollout.sleep == "auto" else config


def engine_size(
    config: RunConfig, num_gpus: int, tree: Mapping[str, Any], gpu_bytes: Mapping[int, int]
) -> int:
    """Returns GPUs per engine: the fewest whose memory holds weights and a KV cache, at most half of all."""
    num_bytes = sum(file.stat().st_size for file in Path(config.model.path).glob("*.safetensors"))
    heads = (tree.get("text_config") or tree).get("num_attention_heads")
    smallest = min(gpu_bytes.values(), default=_USUAL_MEMORY)
    room = smallest * config.rollout.gpu_memory_utilization * _WEIGHTS_SHARE
    size = 1
    while (
        num_bytes / size > room
        and 4 * size <= num_gpus
        and not (isinstance(heads, int) and heads % (2 * size))
    ):
        size *= 2
    return size


def with_fair_share(config: RunConfig) -> RunConfig:
    """Limits a server's sequences to its share of a batch, if the file leaves rollout.max_num_seqs open.

    A server takes prompts while it has room. Without the limit, the faster of two servers took 18 of 32
    prompts and the other one waited: with 3B on two H100s, generation took 6.2 s instead of 5.3 s with 16
    prompts each.
    """
    rollout = config.rollout
    if rollout.replicas == 1 or "max_num_seqs" in rollout.model_fields_set:
        return config
    share = math.ceil(config.data.train_batch_size / rollout.training_servers) * rollout.n
    most = min(rollout.max_num_seqs, max(_LEAST_SEQUENCES, share))
    return config.changed(rollout={"max_num_seqs": most})


def with_shared_memory(config: RunConfig) -> RunConfig:
    """Sends pushes through memory that both sides can access, unless the file says otherwise."""
    if config.weights.backend != "auto":
        return config
    return config.changed(weights={"backend": "shared"})


def _share_out(
    config: RunConfig, gpus: Sequence[int], tree: Mapping[str, Any], gpu_bytes: Mapping[int, int]
) -> RunConfig:
    """Gives every GPU a learner rank and a part of an engine, unless the file says otherwise."""
    learner, rollout = config.learner, config.rollout
    size = rollout.tensor_model_parallel_size
    if "tensor_model_parallel_size" not in rollout.model_fields_set:
        size = engine_size(config, len(gpus), tree, gpu_bytes)
    ranks = learner.world_size if "world_size" in learner.model_fields_set else len(gpus)
    learner_gpus = learner.devices if learner.devices is not None else tuple(gpus[:ranks])
    engine_gpus = rollout.devices if rollout.devices is not None else tuple(gpus)
    servers = rollout.replicas if "replicas" in rollout.model_fields_set else len(engine_gpus) // size
    servers = max(1, servers)
    return config.changed(
        learner={"world_size": len(learner_gpus), "devices": learner_gpus},
        rollout={
            "replicas": servers,
            "tensor_model_parallel_size": size,
            "devices": engine_gpus[: servers * size],
        },
    )


def _beside(config: RunConfig, shape: ModelShape, totals: Sequence[int]) -> float:
    """Returns the share of a GPU that an engine may take next to the learner's resident memory.

    If the file leaves the place of optimizer averages open, they count as on the GPU, unless that leaves no
    room for the engine.
    """
    learner, engine = LearnerMemory.of(config, shape, totals), EngineMemory.of(config, shape)
    share = _free_share(config, learner, totals)
    has_room = share * min(totals) >= engine.budget_for(config.engine_model_len)
    if has_room or config.actor.memory.offload is not None:
        return share
    return _free_share(config, learner.changed(offloads=True), totals)


def _free_share(config: RunConfig, learner: LearnerMemory, totals: Sequence[int]) -> float:
    share = 1.0 - learner.kept_beside(config) / min(totals) - _MARGIN
    return max(0.1, min(_MOST_UTILIZATION, int(100 * share) / 100))


def _needed(config: RunConfig, shape: ModelShape, totals: Sequence[int]) -> float:
    """Returns the share of a GPU that an engine needs to decode max_num_seqs longest sequences at once.

    More memory would be allocated and freed at every turn without use. For episodes, the engine gets all that
    is left, because they keep their tokens in the cache while they wait for the environment.
    """
    if config.rollout.tools or config.rollout.environment is not None:
        return 1.0
    num_tokens = config.rollout.max_num_seqs * (config.engine_model_len + _SPARE_TOKENS)
    engine = EngineMemory.of(config, shape)
    return math.ceil(100 * engine.budget_for(num_tokens) / min(totals)) / 100


def _is_better_awake(awake: RunConfig, turns: RunConfig, shape: ModelShape, machine: Machine) -> bool:
    """Returns whether a step is shorter with engines that stay awake, and its update fits next to them."""
    beside, best = update_choice(awake, machine), update_choice(turns, machine)
    if not beside.fits or beside == best:
        return beside.fits
    card = machine.card or CARDS["H100"]
    seconds = StepTime.of(beside.put_into(awake), shape, card).seconds
    return seconds < _CLEARLY * StepTime.of(best.put_into(turns), shape, card).seconds


def _with_safe_memory(config: RunConfig) -> RunConfig:
    """Lets engines sleep and take less than half of a GPU, because both sides may not fit."""
    config = config.changed(rollout={"sleep": "always"}) if config.rollout.sleep == "auto" else config
    return _with_utilization(config, SHARED_MEMORY)


def _with_utilization(config: RunConfig, share: float) -> RunConfig:
    if "gpu_memory_utilization" in config.rollout.model_fields_set:
        return config
    return config.changed(rollout={"gpu_memory_utilization": share})


def _with_fixed_cache(config: RunConfig, shape: ModelShape, totals: Sequence[int]) -> RunConfig:
    """Fixes the KV cache's size; else the engine would measure it while the learner loads on the same GPU."""
    rollout = config.rollout
    num_bytes = EngineMemory.of(config, shape).generation(engine_budget(config, min(totals)))["kv cache"]
    for engine in rollout.engine_names if num_bytes > 0 else ():
        name, given = engine_facts(engine).cache_argument, rollout.with_engine(engine).engine_kwargs
        if name and name not in given:
            rollout = rollout.with_kwargs(engine, {**given, name: num_bytes})
    return config.model_copy(update={"rollout": rollout})
