"""The memory of an engine on its GPU, for the planner and for the learner that frees memory for it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from paceline.config.run import RunConfig
from paceline.core.members import EnginePart
from paceline.engines.facts import EngineFacts
from paceline.engines.registry import engine_facts
from paceline.models.model_shape import ModelShape

GIB = 1 << 30
CONTEXT = 3 * GIB // 2
"""CUDA's context, NCCL's buffers and libraries of one process, an engine's or a learner rank's."""
SLICE = 1024
"""Tokens of the vocabulary per slice; the sampling kernels keep the largest logit and a sum per slice."""
MARGIN = 3 * GIB
"""Bytes besides weights and KV cache: the engine's activations, and what its libraries allocate."""
MEASURED_MARGIN = GIB // 2
"""Margin in bytes on top of an engine's measured memory."""

Parts = Mapping[str, int]
"""Bytes by purpose."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineMemory:
    """The memory of one GPU of a rollout engine: one model for planner, checks and learner.

    With several engines, the one that takes the most memory counts.

    An engine takes at most its budget (`rollout.gpu_memory_utilization`), including weights and context.
    Asleep, it keeps its context and captured graphs.

    Attributes:
        weights: bytes of the weights in the type used for computing.
        sampler: peak memory of sampling a full batch: two rows of numbers and log-probabilities per sequence,
            four rows of integers if all sequences begin at once, and the largest logit and a sum per slice of
            the vocabulary. The kernels keep no table of the vocabulary.
        rest: activations and CUDA graphs. When it starts, an engine samples once for all sequences with its
            own sampler, and reuses that memory for activations (logits and four float32 tables).
    """

    weights: int
    bytes_per_token: int = 0
    sampler: int = 0
    rest: int
    asleep: int

    @classmethod
    def of(cls, config: RunConfig, shape: ModelShape) -> EngineMemory:
        """Plans the memory of a run's engine."""
        rollout, ranks = config.rollout, config.rollout.tensor_model_parallel_size
        rows = (2 * (8 + 4) + 4 * 8) * (config.engine_model_len + 1)
        slices = (4 + 8) * -(-shape.vocab // SLICE)
        bytes_per_number = _bytes_per_number(config)
        numbers = shape.num_parameters + shape.num_in_tower
        if shape.latent is not None:
            numbers += shape.num_layers * shape.latent.absorbed
        plain = cls.of_numbers(config, numbers)
        graphs = plain.asleep - CONTEXT
        logits = rollout.max_num_seqs * (bytes_per_number + 4 * 4) * shape.vocab
        return replace(
            plain,
            bytes_per_token=shape.num_layers * shape.cached(ranks) * bytes_per_number,
            sampler=0 if rollout.sampler == "engine" else rollout.max_num_seqs * (rows + slices),
            rest=max(plain.rest, graphs + logits) + cls._of_images(config, shape, bytes_per_number),
        )

    @classmethod
    def of_numbers(cls, config: RunConfig, numbers: int) -> EngineMemory:
        """Plans from the number of weights only, if their shapes are unknown."""
        return cls(
            weights=-(-numbers * _bytes_per_number(config) // config.rollout.tensor_model_parallel_size),
            rest=max(facts.rest_bytes for facts in _engines(config)),
            asleep=_asleep(config),
        )

    @staticmethod
    def _of_images(config: RunConfig, shape: ModelShape, bytes_per_number: int) -> int:
        """Returns the bytes of the tower's activations for a batch's images, and of their kept states.

        States for decoder layers are kept twice: per image, and for the tokens of a pass.
        """
        if shape.tower is None or config.data.image_key is None:
            return 0
        prefill = (facts.prefill_tokens for facts in _engines(config))
        num_tokens = max(*prefill, config.data.max_prompt_length)
        states = num_tokens * (1 + 2 * shape.tower.num_features) * shape.tower.out * bytes_per_number
        return states + shape.tower.activations(shape.num_patches(num_tokens), bytes_per_number)

    def budget_for(self, num_tokens: int) -> int:
        """Returns the budget with which `num_tokens` fit into the KV cache."""
        return CONTEXT + self.rest + self.weights + self.sampler + num_tokens * self.bytes_per_token

    def generation(self, budget: int) -> Parts:
        """Returns how an engine divides its budget; the cache may be negative."""
        rest = {
            "context": CONTEXT,
            "weights": self.weights,
            "graphs": self.rest,
            "sampler": self.sampler,
        }
        return {**rest, "kv cache": budget - sum(rest.values())}

    def woken(self, parts: Collection[EnginePart], config: RunConfig, total: int, measured: int = 0) -> int:
        """Returns the additional bytes that an engine takes when parts of it wake, with a margin.

        Args:
            measured: most bytes that an engine of the run was observed to take at once; 0 if unknown.
        """
        weights = self.weights if EnginePart.WEIGHTS in parts else 0
        cache = self._woken_cache(config, total, measured) if EnginePart.KV_CACHE in parts else 0
        return weights + cache + (MEASURED_MARGIN if measured else MARGIN)

    def _woken_cache(self, config: RunConfig, total: int, measured: int) -> int:
        """Returns the bytes of cache and activations, which wake together."""
        if measured:
            return max(0, measured - self.weights)
        fixed = fixed_cache(config)
        if fixed is not None:
            return fixed
        return max(0, engine_budget(config, total) - self.asleep - self.weights)


def fixed_cache(config: RunConfig) -> int | None:
    """Returns the most bytes that `rollout.engine_kwargs` fix for a KV cache; None if one measures."""
    sizes = [
        one.rollout.engine_kwargs.get(facts.cache_argument)
        for one, facts in zip(config.by_engine, _engines(config), strict=True)
    ]
    known = [size for size in sizes if isinstance(size, int)]
    return max(known) if len(known) == len(sizes) else None


def engine_budget(config: RunConfig, total: int) -> int:
    """Returns the bytes that an engine takes of a GPU with `total` bytes."""
    return int(config.rollout.gpu_memory_utilization * total)


def engine_while_training(config: RunConfig, total: int) -> int:
    """Returns the bytes that an engine keeps while the learner trains on its GPU."""
    if config.rollout.sleep == "always":
        return _asleep(config)
    return engine_budget(config, total)


def _engines(config: RunConfig) -> list[EngineFacts]:
    return [engine_facts(name) for name in config.rollout.engine_names]


def _asleep(config: RunConfig) -> int:
    return max(facts.asleep_bytes for facts in _engines(config))


def _bytes_per_number(config: RunConfig) -> int:
    return 2 if config.model.dtype == "bfloat16" else 4
