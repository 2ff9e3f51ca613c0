"""The memory that a run needs on each GPU, by phase, from config.json and the configuration alone.

An estimate: weights, optimizer and gradients are counted; activations follow a formula that two measured
peaks of a 7B model confirm within a twentieth (tests/unit/cli/test_memory_plan.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from paceline.config.run import RunConfig
from paceline.core.errors import ConfigError

GIB = 1 << 30
CONTEXT = 3 * GIB // 2
"""CUDA's context, NCCL's buffers and libraries of one process."""
ENGINE_ASLEEP = 2 * GIB
"""What an engine that sleeps keeps: its context and its captured graphs."""
ENGINE_REST = 2 * GIB
"""An engine's activations and CUDA graphs."""
OFFLOADED = GIB
"""Averages of parameters that visit the GPU at a time, where they are in host memory"""
LOGITS = GIB
"""Chunks of logits and their gradient; the learner bounds them."""

Parts = Mapping[str, int]
"""Bytes by what they are for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """The sizes of a decoder that matter for memory."""

    hidden: int
    intermediate: int
    num_layers: int
    attention_width: int
    kv_width: int
    vocab: int
    tied: bool
    has_bias: bool
    num_experts: int

    @classmethod
    def of(cls, tree: Mapping[str, Any]) -> ModelShape | None:
        """From config.json; None if it names its sizes otherwise."""
        tree = tree.get("text_config", tree)
        try:
            hidden, heads = int(tree["hidden_size"]), int(tree["num_attention_heads"])
            head_dim = int(tree.get("head_dim") or hidden // heads)
            num_experts = int(tree.get("num_experts") or tree.get("num_local_experts") or 0)
            intermediate = tree["moe_intermediate_size" if num_experts else "intermediate_size"]
            return cls(
                hidden=hidden,
                intermediate=int(intermediate),
                num_layers=int(tree["num_hidden_layers"]),
                attention_width=heads * head_dim,
                kv_width=int(tree.get("num_key_value_heads") or heads) * head_dim,
                vocab=int(tree["vocab_size"]),
                tied=bool(tree.get("tie_word_embeddings", False)),
                has_bias=tree.get("model_type") == "qwen2",
                num_experts=num_experts,
            )
        except (KeyError, TypeError, ValueError):
            return None

    @property
    def layer(self) -> int:
        """Parameters of one layer."""
        projections = 2 * self.hidden * (self.attention_width + self.kv_width)
        biases = self.attention_width + 2 * self.kv_width if self.has_bias else 0
        experts = 3 * self.hidden * self.intermediate * max(1, self.num_experts)
        return projections + biases + experts + self.hidden * (2 + self.num_experts)

    @property
    def root(self) -> int:
        """Parameters outside the layers: embedding, head and last norm."""
        return self.vocab * self.hidden * (1 if self.tied else 2) + self.hidden

    @property
    def num_parameters(self) -> int:
        """All of them."""
        return self.num_layers * self.layer + self.root


@dataclass(frozen=True, kw_only=True, slots=True)
class LearnerMemory:
    """A learner rank's memory.

    Args:
        shape: of the policy, and of critic and reference if they are in use.
        world_size: ranks that share the shards.
        bytes_per_number: of the forward pass.
        bytes_per_gradient: of what gradients are summed in.
        num_tokens: of a micro-batch.
        kept_share: share of the activations that the update keeps.
        compiled: whether the layers are.
        keeps_gathered: whether weights stay gathered within a mini-batch.
        accumulates: whether a rank adds up whole gradients.
        offloads: whether AdamW's averages are in host memory.
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

    @classmethod
    def of(cls, config: RunConfig, shape: ModelShape) -> LearnerMemory:
        """Of a run, whose micro-batches are taken to be as large as its settings allow."""
        actor = config.actor
        sequences = actor.ppo_mini_batch_size * config.rollout.n
        most = -(-sequences // config.learner.world_size) * config.max_model_len
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
        )

    @property
    def resident(self) -> Parts:
        """What stays: float32 weights and AdamW's two averages, sharded; the reference as it computes."""
        shard = -(-self.shape.num_parameters // self.world_size)
        networks = 2 if self.has_critic else 1
        reference = shard * self.bytes_per_number if self.has_reference else 0
        return {
            "context": CONTEXT,
            "weights": 4 * shard * networks + reference,
            "optimizer": OFFLOADED if self.offloads else 8 * shard * networks,
        }

    @property
    def scoring(self) -> Parts:
        """Old log-probs, reference and values: a layer at a time; compiled, with the update's graph."""
        activations = self._activations if self.compiled else self._layer
        return {**self.resident, "gathered": self._gathered, "activations": activations + LOGITS}

    @property
    def update(self) -> Parts:
        """Forward and backward of one network."""
        return {
            **self.resident,
            "gradients": self._gradients,
            "gathered": self._gathered,
            "activations": self._activations + LOGITS,
        }

    def changed(self, **fields: Any) -> LearnerMemory:
        """The same with other values."""
        return replace(self, **fields)

    @property
    def most(self) -> int:
        """Bytes of the phase that needs the most."""
        return max(sum(self.scoring.values()), sum(self.update.values()))

    @property
    def _gradients(self) -> int:
        """Whole ones, or this rank's share and those of the layers that are being reduced."""
        if self.accumulates:
            return self.bytes_per_gradient * self.shape.num_parameters
        shard = -(-self.shape.num_parameters // self.world_size)
        return 4 * shard + self.bytes_per_gradient * self._in_flight

    @property
    def _gathered(self) -> int:
        """The whole model, or embedding and head, the layer at work and the next one."""
        number = self.shape.num_parameters if self.keeps_gathered else self._in_flight
        return self.bytes_per_number * number

    @property
    def _in_flight(self) -> int:
        return self.shape.root + 2 * self.shape.layer

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
        """A layer's activations per token: four widths of the MLP and thirteen of the states.

        Compiled, three and nine: products of what is kept are computed again where that costs no matrix
        product.
        """
        inner, states = (3, 9) if self.compiled else (4, 13)
        width = inner * self.shape.intermediate + states * self.shape.hidden
        return self.num_tokens * self.bytes_per_number * width


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineMemory:
    """The memory of one GPU of a rollout engine."""

    weights: int
    bytes_per_token: int

    @classmethod
    def of(cls, config: RunConfig, shape: ModelShape) -> EngineMemory:
        """Of a run."""
        ranks = config.rollout.tensor_model_parallel_size
        bytes_per_number = 2 if config.model.dtype == "bfloat16" else 4
        kv_width = max(1, shape.kv_width // ranks)
        return cls(
            weights=-(-shape.num_parameters * bytes_per_number // ranks),
            bytes_per_token=2 * shape.num_layers * kv_width * bytes_per_number,
        )

    def generation(self, budget: int) -> Parts:
        """What an engine with `budget` bytes makes of them; the cache may be negative."""
        cache = budget - CONTEXT - ENGINE_REST - self.weights
        return {"context": CONTEXT, "weights": self.weights, "graphs": ENGINE_REST, "kv cache": cache}


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
            "push": {**self.learner.resident, "staging": staging},
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
        learner, longest = self.learner, self.config.max_model_len
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
        leanest = leanest.changed(offloads=True)
        for world_size in (learner.world_size, *(learner.world_size << doubled for doubled in (1, 2, 3))):
            if leanest.changed(world_size=world_size).most <= total:
                ranks = "" if world_size == learner.world_size else f"learner.world_size to {world_size}, "
                return (
                    f"set {ranks}actor.memory to {{recompute: full, accumulate: false, offload: true}} and "
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
