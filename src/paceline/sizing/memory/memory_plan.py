"""Plans the memory that a run needs on each GPU, by phase, from config.json and the configuration.

Weights, optimizer and gradients are counted. Activations are estimated by a formula that agrees with measured
peaks of a 7B model and of a Mixture of Experts within a twentieth (tests/unit/cli/test_learner_memory.py).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.config.run import RunConfig
from paceline.core.errors import ConfigError
from paceline.engines.memory import GIB, EngineMemory, Parts, engine_budget, engine_while_training
from paceline.models.model_shape import ModelShape
from paceline.sizing.memory.learner_memory import LearnerMemory, longest_row


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPlan:
    """The plan of a run.

    Args:
        totals: bytes of each GPU, by index; GPUs whose size is not known are left out.
        host_bytes: free memory of the host; 0 if it is not known.
    """

    config: RunConfig
    learner: LearnerMemory
    engine: EngineMemory
    learner_gpus: Sequence[int]
    engine_gpus: Sequence[int]
    totals: Mapping[int, int]
    host_bytes: int = 0

    @classmethod
    def of(
        cls,
        config: RunConfig,
        shape: ModelShape,
        *,
        learner_gpus: Sequence[int],
        engine_gpus: Sequence[int],
        totals: Mapping[int, int],
        host_bytes: int = 0,
    ) -> MemoryPlan:
        """Plans from the configuration and the assignment of GPUs."""
        return cls(
            config=config,
            learner=LearnerMemory.of(config, shape, [totals[gpu] for gpu in learner_gpus if gpu in totals]),
            engine=EngineMemory.of(config, shape),
            learner_gpus=learner_gpus,
            engine_gpus=engine_gpus,
            totals=totals,
            host_bytes=host_bytes,
        )

    @property
    def refusal(self) -> str:
        """Says which GPU has too little memory, and what to change; "" if all have enough."""
        try:
            self._check()
        except ConfigError as error:
            return str(error)
        return ""

    @property
    def shared_gpus(self) -> list[int]:
        """GPUs with a learner rank and an engine."""
        return sorted({*self.learner_gpus} & {*self.engine_gpus})

    @property
    def _staging(self) -> int:
        """Bytes of staging that a learner rank keeps for pushes; twice, if it also keeps an engine's."""
        return (self.config.weights.staging_mib << 20) * (2 if self.shared_gpus else 1)

    def lines(self) -> list[str]:
        """Formats the plan: a line per kind of GPU and phase.

        Raises:
            ConfigError: something cannot fit; the message says what to change.
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
        if inputs := self.learner.host_inputs:
            lines.append(f"host memory, update: inputs of layers {_gib(inputs)} per rank")
        self._check()
        return lines

    def _together(self) -> list[str]:
        """Formats the memory of both sides on shared GPUs, by turn."""
        lines = []
        shared = self.shared_gpus
        for total in sorted({self.totals[gpu] for gpu in shared if gpu in self.totals}):
            gpus = [gpu for gpu in shared if self.totals.get(gpu) == total]
            resident, budget = sum(self.learner.resident.values()), engine_budget(self.config, total)
            training = engine_while_training(self.config, total)
            turns = {
                "start": {"learner": sum(self.learner.start.values()), "engine": budget},
                "generation": {"learner": resident, "staging": self._staging, "engine": budget},
                "training": {"learner": self.learner.most, "staging": self._staging, "engine": training},
            }
            lines += [f"together {_list(gpus)}, {name}: {_sum(parts)}" for name, parts in turns.items()]
        return lines

    def _check(self) -> None:
        self._check_host()
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
                f"{self._fewer_copies(total - asleep) or self._advice(total - asleep)}"
            )

    def _check_host(self) -> None:
        """Checks that the host has room for the inputs of layers of all ranks that this plan knows."""
        if not self.host_bytes or self._has_host_room(self.learner):
            return
        num_ranks, share = len(self.learner_gpus), self.config.actor.memory.host_share
        raise ConfigError(
            f"the host has {_gib(self.host_bytes)} of free memory, and {num_ranks} learner ranks would pin "
            f"{_gib(self.learner.host_inputs)} each for inputs of layers, more than a share of {share:g}: "
            f"set actor.memory.host_gib to at most {self.host_bytes // (GIB * num_ranks)}, a lower "
            "actor.ppo_max_token_len_per_gpu, or actor.memory.recompute: full"
        )

    def _has_host_room(self, learner: LearnerMemory) -> bool:
        """Returns whether the host has room for the inputs of layers of a learner's ranks."""
        most = self.config.actor.memory.host_share * self.host_bytes
        return len(self.learner_gpus) * learner.host_inputs <= most

    def _check_generation(self, gpu: int, total: int) -> None:
        """Checks that the learner fits next to an engine that starts or is awake."""
        stays = self.learner.kept_beside(self.config)
        if stays + engine_budget(self.config, total) > total:
            raise ConfigError(
                f"GPU {gpu} has {_gib(total)}; the learner keeps {_gib(stays)} while the engine takes "
                f"{_gib(engine_budget(self.config, total))}: set rollout.gpu_memory_utilization to at most "
                f"{max(0.0, (total - stays) / total):.2f}"
            )

    def _check_cache(self, gpu: int, budget: int) -> None:
        longest = self.config.engine_model_len
        cache = self.engine.generation(budget)["kv cache"]
        if cache < longest * self.engine.bytes_per_token:
            raise ConfigError(
                f"GPU {gpu}: an engine with {_gib(budget)} (rollout.gpu_memory_utilization="
                f"{self.config.rollout.gpu_memory_utilization}) has {_gib(max(0, cache))} for its KV cache, "
                f"and one sequence of {longest} tokens takes {_gib(longest * self.engine.bytes_per_token)}; "
                "raise rollout.gpu_memory_utilization or rollout.tensor_model_parallel_size"
            )

    def _fewer_copies(self, total: int) -> str:
        """Advises one copy of the weights over all ranks if that fits; "" if it does not."""
        num_shards, world_size = self.learner.num_shards, self.config.learner.world_size
        if num_shards == world_size or self.learner.changed(num_shards=world_size).most > total:
            return ""
        return f"leave learner.fsdp_size={num_shards} out, so that all {world_size} ranks share one copy"

    def _advice(self, total: int) -> str:
        """Returns the first setting that makes the update fit."""
        learner, longest = self.learner, longest_row(self.config, self.learner.shape)
        lean = learner.changed(kept_share=0.0, keeps_gathered=False)

        def most_tokens(memory: LearnerMemory) -> int | None:
            sizes = range(longest, learner.num_tokens)
            fitting = bisect_left(sizes, True, key=lambda n: memory.changed(num_tokens=n).most > total)
            return sizes[fitting - 1] if fitting else None

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
        on_host = leanest.changed(inputs_on_host=True)
        if on_host.most <= total and self._has_host_room(on_host):
            return f"set actor.memory to {{recompute: from_host, accumulate: false}} and {least}"
        offloads = "offload: true"
        if leanest.frozen:
            leanest, offloads = leanest.changed(offloads_frozen=True), "offload_reference: true"
            if leanest.most <= total:
                return f"set actor.memory to {{recompute: full, accumulate: false, {offloads}}} and {least}"
            offloads = f"offload: true, {offloads}"
        return self._with_more_ranks(leanest.changed(offloads=True), total, offloads)

    def _with_more_ranks(self, leanest: LearnerMemory, total: int, offloads: str) -> str:
        """Says how many ranks have to share a row, or the weights, if nothing else makes the update fit."""
        learner, world_size, longest = self.learner, self.config.learner.world_size, leanest.num_tokens
        lean = f"actor.memory to {{recompute: full, accumulate: false, {offloads}}}"
        if leanest.most > total and (context := self._context(leanest, total)):
            row = -(-longest * self.config.learner.num_context_ranks // context)
            return (
                f"set learner.context_parallel to {context}, {lean} and "
                f"actor.ppo_max_token_len_per_gpu: {row}"
            )
        for num_shards in (learner.num_shards, *(world_size << doubled for doubled in range(4))):
            if leanest.changed(num_shards=num_shards).most <= total:
                ranks = "" if num_shards == learner.num_shards else f"{self._ranks} to {num_shards}, "
                return f"set {ranks}{lean} and actor.ppo_max_token_len_per_gpu: {longest}"
        return (
            f"weights, optimizer and the least that an update keeps do not fit on {8 * world_size} "
            "such GPUs either; use a smaller model or GPUs with more memory"
        )

    def _context(self, leanest: LearnerMemory, total: int) -> int:
        """Returns how many ranks must share a row to make it fit; 0 if that does not help."""
        world_size, now = self.config.learner.world_size, self.config.learner.num_context_ranks
        row = now * leanest.num_tokens
        for size in range(now + 1, world_size + 1):
            fits = leanest.changed(num_tokens=-(-row // size), context=size).most <= total
            if fits and world_size % size == leanest.shape.num_heads % size == 0:
                return size
        return 0

    @property
    def _ranks(self) -> str:
        """Names the setting that says how many ranks share the weights."""
        return "learner.world_size" + ("" if self.config.learner.ranks_per_copy is None else " and fsdp_size")


def _sum(parts: Parts) -> str:
    return f"{_gib(sum(parts.values()))} = " + " + ".join(
        f"{name} {_gib(number)}" for name, number in parts.items()
    )


def _gib(number: int) -> str:
    return f"{number / GIB:.1f} GiB"


def _list(gpus: Sequence[int]) -> str:
    return f"GPU {', '.join(map(str, gpus))}" if gpus else "ranks"
