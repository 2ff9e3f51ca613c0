"""The memory of a rollout engine on its GPU: as a run is planned, and as the learner beside it counts it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from paceline.config.run import RunConfig
from paceline.core.members import EnginePart
from paceline.engines.registry import engine_facts
from paceline.models.model_shape import ModelShape
from paceline.sizing.learner_memory import CONTEXT, GIB, Parts, has_images

ENGINE_ASLEEP = 2 * GIB
"""What an engine that sleeps keeps: its context and its captured graphs."""
ENGINE_REST = 2 * GIB
"""The least for an engine's activations and CUDA graphs."""
ENGINE_PREFILL = 8192
"""Prompt tokens that an engine computes at a time on a GPU, unless it is told otherwise"""
SLICE = 1024
"""Tokens of the vocabulary per slice: the draw's kernels keep a largest logit and a sum of each."""
MARGIN = 3 << 30
"""Bytes beside weights and KV cache: the engine's activations, and what its libraries allocate."""
MEASURED_MARGIN = 512 << 20
"""Bytes beside what an engine was seen to take."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineMemory:
    """The memory of one GPU of a rollout engine.

    Attributes:
        sampler: the most that drawing a batch at once takes: two rows of numbers and log-probabilities per
            sequence, four of integers where all begin at once, and a largest logit and a sum per slice of the
            vocabulary. The kernels keep no table of the vocabulary.
        rest: activations and CUDA graphs. An engine draws once for all sequences when it starts, with its own
            sampler, and keeps that memory for activations: logits, and four tables of float32.
    """

    weights: int
    bytes_per_token: int
    sampler: int = 0
    rest: int = ENGINE_REST

    @classmethod
    def of(cls, config: RunConfig, shape: ModelShape) -> EngineMemory:
        """Plans the memory of a run's engine."""
        rollout, ranks = config.rollout, config.rollout.tensor_model_parallel_size
        rows = (2 * (8 + 4) + 4 * 8) * (config.max_model_len + 1)
        slices = (4 + 8) * -(-shape.vocab // SLICE)
        bytes_per_number = _bytes_per_number(config)
        numbers = shape.num_parameters + shape.num_frozen
        if shape.latent is not None:
            numbers += shape.num_layers * shape.latent.absorbed
        graphs = ENGINE_ASLEEP - CONTEXT
        return cls(
            weights=-(-numbers * bytes_per_number // ranks),
            bytes_per_token=shape.num_layers * shape.cached(ranks) * bytes_per_number,
            sampler=0 if rollout.sampler == "engine" else rollout.max_num_seqs * (rows + slices),
            rest=max(ENGINE_REST, graphs + rollout.max_num_seqs * (bytes_per_number + 4 * 4) * shape.vocab)
            + cls._of_images(config, shape, bytes_per_number),
        )

    @staticmethod
    def _of_images(config: RunConfig, shape: ModelShape, bytes_per_number: int) -> int:
        """The tower's activations for the images of a batch of prompts, and their states, which are kept."""
        if shape.tower is None or not has_images(config):
            return 0
        num_tokens = max(ENGINE_PREFILL, config.data.max_prompt_length)
        states = num_tokens * shape.tower.out * bytes_per_number
        return states + shape.tower.activations(shape.num_patches(num_tokens), bytes_per_number)

    def budget_for(self, num_tokens: int) -> int:
        """The bytes with which so many tokens fit into the KV cache."""
        return CONTEXT + self.rest + self.weights + self.sampler + num_tokens * self.bytes_per_token

    def generation(self, budget: int) -> Parts:
        """What an engine with `budget` bytes makes of them; the cache may be negative."""
        rest = {
            "context": CONTEXT,
            "weights": self.weights,
            "graphs": self.rest,
            "sampler": self.sampler,
        }
        return {**rest, "kv cache": budget - sum(rest.values())}


def engine_budget(config: RunConfig, total: int) -> int:
    """Bytes of a GPU with `total` that an engine takes."""
    return int(config.rollout.gpu_memory_utilization * total)


def engine_while_training(config: RunConfig, total: int) -> int:
    """Bytes that an engine keeps while the learner trains on its GPU."""
    return ENGINE_ASLEEP if config.rollout.sleep == "always" else engine_budget(config, total)


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSize:
    """Bytes that an engine takes on one GPU when it wakes; the margin comes with either part."""

    weights: int
    kv_cache: int
    margin: int = MARGIN

    @classmethod
    def of(
        cls, config: RunConfig, num_parameters: int, gpu_bytes: int, measured_bytes: int = 0
    ) -> EngineSize:
        """Returns the size of a run's engines, on GPUs of this size.

        `measured_bytes` are what an engine was seen to take; 0 if none was.
        """
        rollout, width = config.rollout, _bytes_per_number(config)
        weights = num_parameters * width // rollout.tensor_model_parallel_size
        if measured_bytes:
            # Activations come with the cache: nothing is computed before it is there.
            return cls(weights=weights, kv_cache=max(0, measured_bytes - weights), margin=MEASURED_MARGIN)
        cache = rollout.engine_kwargs.get(engine_facts(rollout.name).cache_argument)
        return cls(
            weights=weights,
            kv_cache=cache if isinstance(cache, int) else engine_budget(config, gpu_bytes),
        )

    def bytes_of(self, parts: Collection[EnginePart]) -> int:
        """Returns the bytes of some parts, with a margin."""
        weights = self.weights if EnginePart.WEIGHTS in parts else 0
        return weights + (self.kv_cache if EnginePart.KV_CACHE in parts else 0) + self.margin


def _bytes_per_number(config: RunConfig) -> int:
    return 2 if config.model.dtype == "bfloat16" else 4
