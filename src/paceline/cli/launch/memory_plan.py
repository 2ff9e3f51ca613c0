"""The memory that a run needs on each GPU, by phase, from config.json and the configuration alone.

An estimate: weights, optimizer and gradients are counted; activations follow a formula that measured peaks
of a 7B model and of a Mixture of Experts confirm within a twentieth (tests/unit/cli/test_memory_plan.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from paceline.cli.launch.model_shape import ModelShape
from paceline.config.run import RunConfig
from paceline.core.errors import ConfigError

GIB = 1 << 30
CONTEXT = 3 * GIB // 2
"""CUDA's context, NCCL's buffers and libraries of one process."""
ENGINE_ASLEEP = 2 * GIB
"""What an engine that sleeps keeps: its context and its captured graphs."""
ENGINE_REST = 2 * GIB
"""The least for an engine's activations and CUDA graphs."""
ENGINE_PREFILL = 8192
"""Prompt tokens that vLLM computes at a time on a GPU, unless it is told otherwise"""
SLICE = 1024
"""Tokens of the vocabulary per slice: the draw's kernels keep a largest logit and a sum of each."""
OFFLOADED = GIB
"""Averages of parameters that visit the GPU at a time, where they are in host memory"""
LOGITS = GIB
"""Chunks of logits and their gradient; the learner bounds them."""

Parts = Mapping[str, int]
"""Bytes by what they are for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LearnerMemory:
    """A learner rank's memory.

    Args:
        shape: of the policy, and of critic and reference if they are in use.
        world_size: ranks that share the shards.
        bytes_per_number: of the forward pass.
        bytes_per_gradient: of what gradients are summed in.
        num_tokens: of a micro-batch, with the patches of its images.
        kept_share: share of the activations that the update keeps.
        compiled: whether the layers are.
        keeps_gathered: whether weights stay gathered within a mini-batch.
        accumulates: whether a rank adds up whole gradients.
        offloads: whether AdamW's averages are in host memory.
        has_critic: whether a critic trains, too.
        has_reference: whether a reference model scores.
        offloads_reference: whether it is in host memory except while it scores.
        num_adapters: numbers of the policy's adapters, which alone train; 0: all its weights do.
        num_adapted: numbers of the matrices that have adapters.
        has_images: whether prompts have images.
    """

    shape: ModelShape
    world_size: int
    bytes_per_number: int
    bytes_per_gradient: int
    num_tokens: int
    kept_share: float
    compiled: bool
    keeps_gathered: bool
    accumulates: bool
    offloads: bool
    has_critic: bool
    has_reference: bool
    offloads_reference: bool = False
    num_adapters: int = 0
    num_adapted: int = 0
    has_images: bool = False

    @classmethod
    def of(cls, config: RunConfig, shape: ModelShape) -> LearnerMemory:
        """Of a run, whose micro-batches are taken to be as large as its settings allow."""
        actor = config.actor
        sequences = actor.ppo_mini_batch_size * config.rollout.n
        most = -(-sequences // config.learner.world_size) * _longest_row(config, shape)
        lora = config.model.lora
        return cls(
            shape=shape,
            world_size=config.learner.world_size,
            bytes_per_number=2 if config.model.dtype == "bfloat16" else 4,
            bytes_per_gradient=2 if actor.reduce_dtype == "bfloat16" else 4,
            num_tokens=min(actor.ppo_max_token_len_per_gpu, most),
            kept_share=actor.memory.kept_share,
            compiled=actor.compile,
            keeps_gathered=actor.memory.keeps_gathered,
            accumulates=actor.memory.accumulates,
            offloads=actor.memory.offloads,
            has_critic=config.needs_critic,
            has_reference=config.needs_reference,
            offloads_reference=actor.memory.offload_reference,
            num_adapters=0 if lora is None else shape.num_adapters(lora.targets, lora.rank),
            num_adapted=0 if lora is None else shape.num_adapted(lora.targets),
            has_images=_has_images(config),
        )

    @property
    def resident(self) -> Parts:
        """What stays: float32 weights and AdamW's two averages, sharded; what is frozen as it computes.

        With adapters the policy is frozen, and the reference is the policy without them. A vision tower is
        kept as the network around it is, and has no averages.
        """
        shard, trained = self._share(self.shape.num_parameters), self._share(self._num_trained)
        tower = self._share(self.shape.num_frozen)
        critic = shard if self.has_critic else 0
        reference = 0 if self.offloads_reference else self._reference
        frozen = self.bytes_per_number * (shard + tower) if self.num_adapters else reference + 4 * tower
        return {
            "context": CONTEXT,
            "weights": 4 * (trained + critic + (tower if self.has_critic else 0)) + frozen,
            "optimizer": OFFLOADED if self.offloads else 8 * (trained + critic),
        }

    @property
    def scoring(self) -> Parts:
        """Old log-probs, reference and values: a layer at a time; compiled, with the update's graph."""
        activations = self._activations if self.compiled else self._layer
        visiting = {"reference": self._reference} if self.offloads_reference else {}
        return {
            **self.resident,
            **visiting,
            "gathered": self._gathered,
            "activations": max(activations + LOGITS, self._of_images),
        }

    @property
    def update(self) -> Parts:
        """Forward and backward of one network, or its optimizer step, whichever needs more."""
        backward = {
            **self.resident,
            "gradients": self._gradients,
            "gathered": self._gathered,
            "activations": max(self._activations + LOGITS, self._of_images),
        }
        return max(backward, self._optimizer_step, key=lambda parts: sum(parts.values()))

    @property
    def _optimizer_step(self) -> Parts:
        """Whole gradients have become float32 shards; averages in host memory visit."""
        numbers = self.shape.num_parameters if self.has_critic else self._num_trained
        visitors = {}
        if self.offloads and not self.num_adapters:
            # Two parts of them, of a parameter at least: the largest, and the one after it.
            visitors = {"visiting": max(0, 12 * self._share(self.shape.largest) - OFFLOADED)}
        return {**self.resident, "gradients": 4 * self._share(numbers), **visitors}

    @property
    def push(self) -> Parts:
        """Adapters are merged in place: the bits that come back afterwards are kept."""
        merged = {"merged": self.bytes_per_number * self._share(self.num_adapted)}
        return {**self.resident, **(merged if self.num_adapters else {})}

    def changed(self, **fields: Any) -> LearnerMemory:
        """The same with other values."""
        return replace(self, **fields)

    @property
    def most(self) -> int:
        """Bytes of the phase that needs the most."""
        return max(sum(self.scoring.values()), sum(self.update.values()))

    @property
    def _reference(self) -> int:
        """This rank's share of a reference model of its own."""
        has_own = self.has_reference and not self.num_adapters
        numbers = self.shape.num_parameters + self.shape.num_frozen
        return self.bytes_per_number * self._share(numbers) if has_own else 0

    @property
    def _num_trained(self) -> int:
        """Numbers of the policy that train."""
        return self.num_adapters or self.shape.num_parameters

    def _share(self, numbers: int) -> int:
        return -(-numbers // self.world_size)

    @property
    def _gradients(self) -> int:
        """Whole ones, or this rank's share and those of the layers that are being reduced."""
        numbers, in_flight = self.shape.num_parameters, self._in_flight
        if not self.has_critic and self.num_adapters:
            numbers, in_flight = self.num_adapters, 2 * self.num_adapters // self.shape.num_layers
        if self.accumulates:
            return self.bytes_per_gradient * numbers
        return 4 * self._share(numbers) + self.bytes_per_gradient * in_flight

    @property
    def _gathered(self) -> int:
        """The whole model, or embedding and head, the layer at work and the next one; always the tower."""
        number = self.shape.num_parameters if self.keeps_gathered else self._in_flight
        return self.bytes_per_number * (number + self.shape.num_frozen)

    @property
    def _in_flight(self) -> int:
        return self.shape.root + 2 * self.shape.layer

    @property
    def _of_images(self) -> int:
        """The tower's activations, before the layers have any: of a micro-batch that is images all over.

        Each of its tokens stands for `patches_per_token` patches, and both count in the budget.
        """
        tower = self.shape.tower
        if tower is None or not self.has_images:
            return 0
        num_patches = self.num_tokens * tower.patches_per_token // (1 + tower.patches_per_token)
        return tower.activations(num_patches, self.bytes_per_number)

    @property
    def _activations(self) -> int:
        """Of all layers: the inputs of those that recompute, one of them at work, and what others keep."""
        if self.compiled and self.kept_share:
            return round(self.kept_share * self.shape.num_layers * self._layer)
        recomputed = round((1.0 - self.kept_share) * self.shape.num_layers)
        inputs = recomputed * self.num_tokens * self.shape.hidden * self.bytes_per_number
        return inputs + (self.shape.num_layers - recomputed + (1 if recomputed else 0)) * self._layer

    @property
    def _layer(self) -> int:
        """Of one layer that keeps them."""
        return self.num_tokens * self.bytes_per_number * self.shape.activations(compiled=self.compiled)


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineMemory:
    """The memory of one GPU of a rollout engine.

    Attributes:
        sampler: the most that drawing a batch at once takes: two rows of numbers and log-probabilities per
            sequence, four of integers where all begin at once, and a largest logit and a sum per slice of the
            vocabulary. The kernels keep no table of the vocabulary.
        rest: activations and CUDA graphs. vLLM draws once for all sequences when it starts, with its own
            sampler, and keeps that memory for activations: logits, and four tables of float32.
    """

    weights: int
    bytes_per_token: int
    sampler: int = 0
    rest: int = ENGINE_REST

    @classmethod
    def of(cls, config: RunConfig, shape: ModelShape) -> EngineMemory:
        """Of a run."""
        rollout, ranks = config.rollout, config.rollout.tensor_model_parallel_size
        rows = (2 * (8 + 4) + 4 * 8) * (config.max_model_len + 1)
        slices = (4 + 8) * -(-shape.vocab // SLICE)
        bytes_per_number = 2 if config.model.dtype == "bfloat16" else 4
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
        if shape.tower is None or not _has_images(config):
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


def _has_images(config: RunConfig) -> bool:
    return config.data.image_key is not None


def _longest_row(config: RunConfig, shape: ModelShape) -> int:
    """Tokens of a run's longest row, with the patches of its images."""
    return config.max_model_len + (
        shape.num_patches(config.data.max_prompt_length) if _has_images(config) else 0
    )


def engine_budget(config: RunConfig, total: int) -> int:
    """Bytes of a GPU with `total` that an engine takes."""
    return int(config.rollout.gpu_memory_utilization * total)


def engine_while_training(config: RunConfig, total: int) -> int:
    """Bytes that an engine keeps while the learner trains on its GPU."""
    return ENGINE_ASLEEP if config.rollout.sleep == "always" else engine_budget(config, total)


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPlan:
    """The plan of a run.

    Args:
        totals: bytes of each GPU, by index; GPUs whose size is not known are left out.
    """

    config: RunConfig
    learner: LearnerMemory
    engine: EngineMemory
    learner_gpus: Sequence[int]
    engine_gpus: Sequence[int]
    totals: Mapping[int, int]

    @classmethod
    def of(
        cls,
        config: RunConfig,
        shape: ModelShape,
        *,
        learner_gpus: Sequence[int],
        engine_gpus: Sequence[int],
        totals: Mapping[int, int],
    ) -> MemoryPlan:
        """From the configuration and who has which GPU."""
        return cls(
            config=config,
            learner=LearnerMemory.of(config, shape),
            engine=EngineMemory.of(config, shape),
            learner_gpus=learner_gpus,
            engine_gpus=engine_gpus,
            totals=totals,
        )

    @property
    def shared_gpus(self) -> list[int]:
        """GPUs with a learner rank and an engine."""
        return sorted({*self.learner_gpus} & {*self.engine_gpus})

    @property
    def _staging(self) -> int:
        """What a learner rank keeps for pushes; twice, where it keeps an engine's too."""
        return (self.config.weights.staging_mib << 20) * (2 if self.shared_gpus else 1)

    def lines(self) -> list[str]:
        """The plan for people: a line per kind of GPU and phase.

        Raises:
            ConfigError: something cannot fit; says what to change.
        """
        staging = self._staging
        phases = {
            "scoring": self.learner.scoring,
            "update": self.learner.update,
            "push": {**self.learner.push, "staging": staging},
        }
        lines = [
            f"learner {_list(self.learner_gpus)}, {name}: {_sum(parts)}" for name, parts in phases.items()
        ]
        for total in sorted({self.totals[gpu] for gpu in self.engine_gpus if gpu in self.totals}):
            budget = engine_budget(self.config, total)
            gpus = [gpu for gpu in self.engine_gpus if self.totals.get(gpu) == total]
            lines.append(f"rollout {_list(gpus)}, generation: {_sum(self.engine.generation(budget))}")
            if not self.shared_gpus:
                lines.append(f"rollout {_list(gpus)}, push: staging {_gib(staging)} more")
        lines += self._together()
        self._check()
        return lines

    def _together(self) -> list[str]:
        """Both sides on the GPUs that they share, by turn."""
        lines = []
        shared = self.shared_gpus
        for total in sorted({self.totals[gpu] for gpu in shared if gpu in self.totals}):
            gpus = [gpu for gpu in shared if self.totals.get(gpu) == total]
            resident, budget = sum(self.learner.resident.values()), engine_budget(self.config, total)
            training = engine_while_training(self.config, total)
            turns = {
                "generation": {"learner": resident, "staging": self._staging, "engine": budget},
                "training": {"learner": self.learner.most, "staging": self._staging, "engine": training},
            }
            lines += [f"together {_list(gpus)}, {name}: {_sum(parts)}" for name, parts in turns.items()]
        return lines

    def _check(self) -> None:
        peak = self.learner.most
        for gpu in sorted({*self.learner_gpus, *self.engine_gpus} & self.totals.keys()):
            total = self.totals[gpu]
            engine = 0
            if gpu in self.engine_gpus:
                engine = engine_while_training(self.config, total)
                self._check_cache(gpu, engine_budget(self.config, total))
            if gpu in self.shared_gpus and self.config.rollout.sleep == "always":
                self._check_generation(gpu, total)
            if gpu not in self.learner_gpus or peak + engine <= total:
                continue
            sleeps = self.config.rollout.sleep == "always"
            if engine and peak <= total and not sleeps:
                fitting = max(0.0, (total - peak) / total)
                raise ConfigError(
                    f"GPU {gpu} has {_gib(total)}; the learner needs {_gib(peak)} and the engine beside it "
                    f"takes {_gib(engine)}: set rollout.gpu_memory_utilization to at most {fitting:.2f}, "
                    "rollout.sleep: always, or give them GPUs of their own"
                )
            asleep = engine if sleeps else 0
            beside = f" beside {_gib(asleep)} of a sleeping engine" if asleep else ""
            raise ConfigError(
                f"GPU {gpu} has {_gib(total)}, the learner's update needs {_gib(peak)}{beside}: "
                f"{self._advice(total - asleep)}"
            )

    def _check_generation(self, gpu: int, total: int) -> None:
        """What stays of the learner has to fit beside an engine that is awake."""
        stays = sum(self.learner.resident.values()) + self._staging
        if stays + engine_budget(self.config, total) > total:
            raise ConfigError(
                f"GPU {gpu} has {_gib(total)}; {_gib(stays)} of the learner stay while the engine takes "
                f"{_gib(engine_budget(self.config, total))}: set rollout.gpu_memory_utilization to at most "
                f"{max(0.0, (total - stays) / total):.2f}"
            )

    def _check_cache(self, gpu: int, budget: int) -> None:
        longest = self.config.max_model_len
        cache = self.engine.generation(budget)["kv cache"]
        if cache < longest * self.engine.bytes_per_token:
            raise ConfigError(
                f"GPU {gpu}: an engine with {_gib(budget)} (rollout.gpu_memory_utilization="
                f"{self.config.rollout.gpu_memory_utilization}) has {_gib(max(0, cache))} for its KV cache, "
                f"and one sequence of {longest} tokens takes {_gib(longest * self.engine.bytes_per_token)}; "
                "raise rollout.gpu_memory_utilization or rollout.tensor_model_parallel_size"
            )

    def _advice(self, total: int) -> str:
        """The first setting that makes the update fit."""
        learner, longest = self.learner, _longest_row(self.config, self.learner.shape)
        lean = learner.changed(kept_share=0.0, keeps_gathered=False)

        def most_tokens(memory: LearnerMemory) -> int | None:
            return _largest(
                longest, learner.num_tokens, lambda number: memory.changed(num_tokens=number).most <= total
            )

        if (tokens := most_tokens(learner)) is not None:
            return f"set actor.ppo_max_token_len_per_gpu to at most {tokens}, or recompute activations"
        if lean.most <= total:
            return "set actor.memory.recompute: full"
        if (tokens := most_tokens(lean)) is not None:
            return f"set actor.memory.recompute: full and actor.ppo_max_token_len_per_gpu to at most {tokens}"
        leanest = lean.changed(accumulates=False, num_tokens=longest)
        least = f"actor.ppo_max_token_len_per_gpu: {longest}"
        if leanest.most <= total:
            return f"set actor.memory to {{recompute: full, accumulate: false}} and {least}"
        offloads = "offload: true"
        if leanest.has_reference and not leanest.num_adapters:
            leanest, offloads = leanest.changed(offloads_reference=True), "offload_reference: true"
            if leanest.most <= total:
                return f"set actor.memory to {{recompute: full, accumulate: false, {offloads}}} and {least}"
            offloads = f"offload: true, {offloads}"
        leanest = leanest.changed(offloads=True)
        for world_size in (learner.world_size, *(learner.world_size << doubled for doubled in (1, 2, 3))):
            if leanest.changed(world_size=world_size).most <= total:
                ranks = "" if world_size == learner.world_size else f"learner.world_size to {world_size}, "
                return (
                    f"set {ranks}actor.memory to {{recompute: full, accumulate: false, {offloads}}} and "
                    f"{least}"
                )
        return (
            f"weights, optimizer and the least that an update keeps do not fit on {8 * learner.world_size} "
            "such GPUs either; use a smaller model or GPUs with more memory"
        )


def _largest(low: int, high: int, fits: Any) -> int | None:
    """The largest number in [low, high) that fits, where smaller ones fit too; None if `low` does not."""
    if low >= high or not fits(low):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _sum(parts: Parts) -> str:
    return f"{_gib(sum(parts.values()))} = " + " + ".join(
        f"{name} {_gib(number)}" for name, number in parts.items()
    )


def _gib(number: int) -> str:
    return f"{number / GIB:.1f} GiB"


def _list(gpus: Sequence[int]) -> str:
    return f"GPU {', '.join(map(str, gpus))}" if gpus else "ranks"
