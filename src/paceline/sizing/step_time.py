"""Estimates the seconds of a training step on GPUs, by phase, from config.json and the configuration.

The estimate is a roofline with a few measured constants. Matrix products run at a share of the card's peak;
operations between them move bytes; decoding reads weights and KV cache once per token and waits for its host.
The constants fit recorded steps of 1.5B to 32B on H100s and H200s (test_step_time.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from paceline.config.run import RunConfig
from paceline.core.cards import Card
from paceline.engines.memory import fixed_cache
from paceline.engines.registry import engine_facts
from paceline.models.model_shape import ModelShape, dense_size
from paceline.sizing.compiled_layers import recomputing
from paceline.sizing.memory.learner_memory import LearnerMemory

# Share of a card's peak that matrix products of a training step reach; the largest alone reach 0.76.
_PRODUCTS: Final = 0.65
# Bytes that elementwise kernels and attention move in both passes per number of a layer's activations, with
# compiled layers (True) and without.
_MOVED: Final = {True: 20.0, False: 32.0}
# Share of the card's memory bandwidth that decoding reaches.
_READING: Final = 0.95
# Seconds per decoding step in which the GPU waits for its host: with captured graphs; in addition per
# sequence; and in addition per layer if kernels are launched one by one.
_HOST_S, _HOST_PER_SEQUENCE_S, _HOST_PER_EAGER_LAYER_S = 1.9e-3, 9.7e-6, 0.3e-3
# The first two if the model runs in a process of its own, beside the engine's planning.
_APART_S, _APART_PER_SEQUENCE_S = 1.15e-3, 8.5e-6
# Seconds of an all-reduce between an engine's GPUs; a layer has two.
_ALL_REDUCE_S: Final = 15e-6
# Seconds that the host takes for a layer's forward pass: uncompiled, hidden behind arithmetic; compiled, not
# hidden; and in addition for each expert, because experts are computed one after another.
_LAUNCH_S, _LAUNCH_COMPILED_S, _LAUNCH_PER_EXPERT_S = 0.15e-3, 0.05e-3, 0.07e-3
# Share of the gathers and reductions of an update that is not hidden behind arithmetic.
_EXPOSED: Final = 0.8
# Exchanges of tokens with the ranks of their experts in a layer of an update: two forwards, two backwards.
# They were not timed.
_EXCHANGES: Final = 4
# Gathers and sums of tokens around the divided matrices of a layer: two each forwards, as many backwards.
# Together with sharing rows they took 7 % of an update on two H200s.
_TOKEN_GATHERS: Final = 8
# AdamW: bytes per parameter that are read and written; those over the bus if averages are in host memory, in
# both directions at once.
_OPTIMIZER_BYTES, _VISITING_BYTES = 30.0, 16.0
# Share of the bus's rate that copies of layers' inputs reach. It was not measured.
_COPYING: Final = 0.8
# Share of the link's rate that a push between GPUs reaches, and bytes per second of a push within one GPU.
_PUSH_SHARE, _PUSH_SHARED = 0.65, 2.0e11
_ORDERS_S: Final = 0.03
# Sleeping and waking: seconds besides those for the engine's weights, bytes of weights per second, and bytes
# per second that all learner ranks of a host together free.
_TURN_S, _TURN_RATE, _FREEING_RATE = 0.06, 9e10, 2.8e11
# Seconds of a step for rewards after generation, fetching, advantages and records.
_REST_S: Final = 0.2


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """The estimated seconds of a step's phases.

    Attributes:
        generation: time from the first prompt to the last answer; with `overlaps`, the time that the engines
            need for each step.
        scoring: old log-probs, reference log-probs, values.
        weights: the push, and the turns on shared GPUs.
        num_gpus: number of GPUs that learner and engines use.
        overlaps: whether engines sample later steps while the learner trains (barrier.max_staleness).
    """

    generation: float
    scoring: float
    update: float
    weights: float
    num_tokens: int
    num_gpus: int
    overlaps: bool = False

    @property
    def seconds(self) -> float:
        """Seconds of the whole step.

        Strictly on policy, phases follow each other. Otherwise a step takes as long as the slower side.
        """
        return self.waited + self.scoring + self.update + self.weights + _REST_S

    @property
    def waited(self) -> float:
        """Seconds for which the learner waits for generation."""
        learning = self.scoring + self.update
        return max(0.0, self.generation - learning) if self.overlaps else self.generation

    @property
    def tokens_per_s(self) -> float:
        """Tokens of the batch per second and GPU."""
        return self.num_tokens / self.seconds / self.num_gpus

    @classmethod
    def of(
        cls,
        config: RunConfig,
        shape: ModelShape,
        card: Card,
        *,
        prompt_tokens: int | None = None,
        response_tokens: int | None = None,
    ) -> StepTime:
        """Estimates the step of a run whose configuration leaves nothing open.

        Args:
            shape: shape of the policy; critic and frozen networks are assumed to have the same.
            prompt_tokens, response_tokens: mean lengths of prompts and answers (default: as long as allowed).
        """
        batch = _Batch.of(config, shape, card, prompt_tokens, response_tokens)
        learner, rollout = config.learner, config.rollout
        engines = rollout.replicas * rollout.tensor_model_parallel_size
        shared = learner.devices is not None and learner.devices == rollout.devices
        overlaps = config.barrier.bound > 0 and not shared
        return cls(
            generation=batch.generation_beside_learning if overlaps else batch.generation(),
            scoring=batch.scoring,
            update=batch.update,
            weights=batch.weights(shared=shared),
            num_tokens=batch.num_rows * (batch.prompt + batch.response),
            num_gpus=max(learner.world_size, engines) if shared else learner.world_size + engines,
            overlaps=overlaps,
        )


def learning_time(config: RunConfig, shape: ModelShape, card: Card) -> float:
    """Returns the seconds of scoring and update, for answers of the greatest length."""
    batch = _Batch.of(config, shape, card, None, None)
    return batch.scoring + batch.update


@dataclass(frozen=True, kw_only=True, slots=True)
class _Batch:
    """One step's work. `prompt`, `response`: mean tokens of each."""

    config: RunConfig
    shape: ModelShape
    card: Card
    prompt: int
    response: int

    @classmethod
    def of(
        cls, config: RunConfig, shape: ModelShape, card: Card, prompt: int | None, response: int | None
    ) -> _Batch:
        return cls(
            config=config.with_compile(on_gpu=True),
            shape=shape,
            card=card,
            prompt=prompt or config.data.max_prompt_length,
            response=response or config.data.max_response_length,
        )

    @property
    def num_rows(self) -> int:
        return self.config.data.train_batch_size * self.config.rollout.n

    @property
    def _width(self) -> int:
        """Bytes of a number in forward passes."""
        return 2 if self.config.model.dtype == "bfloat16" else 4

    @property
    def _products_per_s(self) -> float:
        """Operations per second; float32 products are TF32's at best."""
        return _PRODUCTS * self.card.flops * (1.0 if self._width == 2 else 0.5)

    @property
    def generation_beside_learning(self) -> float:
        """Seconds of a step's generation where engines sample later steps while the learner trains.

        If pushes wait for answers, each step samples one batch from beginning to end. If they do not
        (`rollout.in_flight`), `max_staleness + 1` batches are sampled at once: the time that their longest
        answer takes, and one step's learning, are divided among as many steps.
        """
        alone, at_once = self.generation(), self.config.barrier.bound + 1
        if self.config.rollout.in_flight == "wait":
            return alone
        return min(alone, (self.generation(at_once) + self.scoring + self.update) / at_once)

    def generation(self, batches: int = 1) -> float:
        """Seconds in which the engines sample this number of batches at once."""
        rollout, shape, size = self.config.rollout, self.shape, self.config.rollout.tensor_model_parallel_size
        rows = math.ceil(batches * self.num_rows / rollout.training_servers)
        cached = self._width * shape.num_layers * shape.cached(size)
        at_once = min(rows, rollout.max_num_seqs, self._most_cached(cached))
        # An engine takes new sequences as others end. At the end only the longest of the last ones is left.
        tokens = rows * self.response
        steps = tokens / at_once + max(0, self.config.data.max_response_length - self.response)
        running = tokens / steps
        touched = 1.0
        if shape.num_experts:
            touched = 1.0 - (1.0 - shape.num_chosen / shape.num_experts) ** running
        weights = self._width * (shape.active_parameters + touched * shape.idle_parameters) / size
        context = self.prompt + self.response / 2
        reduces = 2 * shape.num_layers * _ALL_REDUCE_S if size > 1 else 0.0
        reading = (weights + running * context * cached) / (_READING * self.card.bandwidth)
        prompts = (
            math.ceil(batches * self.config.data.train_batch_size / rollout.training_servers) * self.prompt
        )
        prefill = 2 * shape.active_parameters * prompts / size / self._products_per_s
        return steps * (reading + self._host(running) + reduces) + prefill

    def _host(self, running: float) -> float:
        """Seconds of a decoding step with this number of sequences in which the GPU waits for its host."""
        rollout, shape = self.config.rollout, self.shape
        if rollout.enforce_eager:
            eager = shape.num_layers * _HOST_PER_EAGER_LAYER_S
            return _HOST_S + running * _HOST_PER_SEQUENCE_S + eager
        is_small = dense_size(shape.num_layers, shape.hidden) < engine_facts(rollout.name).small_below
        if is_small and rollout.engine_kwargs.get("distributed_executor_backend") != "uni":
            return _APART_S + running * _APART_PER_SEQUENCE_S
        return _HOST_S + running * _HOST_PER_SEQUENCE_S

    def _most_cached(self, bytes_per_token: int) -> float:
        """Sequences that fit into the KV cache; samples of a prompt share the prompt's entries."""
        cache = fixed_cache(self.config)
        if cache is None:
            return math.inf
        return max(1.0, cache / bytes_per_token / (self.prompt / self.config.rollout.n + self.response))

    @property
    def scoring(self) -> float:
        config, sequences = self.config, self.config.actor.ppo_mini_batch_size
        share = 1.0 - min(1.0, sequences / config.data.train_batch_size)
        passes = 1.0 if config.scores_first_mini_batch else share
        passes += len(config.frozen_networks) + ("critic" in config.needs)
        return passes * self._pass(forward=1.0, moved=1.0 / 3.0)

    @property
    def update(self) -> float:
        config, memory = self.config, self.config.actor.memory
        if config.actor.compiles:
            single_pass = self._pass(forward=3.0, moved=1.0) * (1.0 + recomputing(memory.kept_share))
        else:
            recomputed = 1.0 - memory.kept_share
            single_pass = self._pass(forward=3.0 + recomputed, moved=1.0 + recomputed / 3.0)
        if memory.inputs_on_host:
            single_pass += self._copying(single_pass)
        steps = self._steps
        per_rank = self._trained / config.learner.num_shards
        optimizer = steps * per_rank * _OPTIMIZER_BYTES / self.card.bandwidth
        if memory.offloads:
            optimizer += steps * per_rank * _VISITING_BYTES / self.card.bus
        times = config.actor.ppo_epochs * (1 + ("critic" in config.needs))
        return times * (single_pass + optimizer + self._between_ranks())

    def _copying(self, single_pass: float) -> float:
        """Returns the seconds of copies of layers' inputs that are not hidden behind the layers' computation.

        The forward pass is a quarter of a pass that recomputes everything.
        """
        learner = LearnerMemory.of(self.config, self.shape)
        share = self._tokens[0] / learner.num_tokens  # of a full micro-batch, those of all micro-batches
        copying = share * learner.host_inputs / (_COPYING * self.card.bus)
        return max(0.0, copying - single_pass / 4) + max(0.0, copying - 3 * single_pass / 4)

    def weights(self, *, shared: bool) -> float:
        """Returns seconds of a push and of the turns that come with it."""
        rollout = self.config.rollout
        per_gpu = self._width * self.shape.num_parameters / rollout.tensor_model_parallel_size
        if not shared:
            return _ORDERS_S + per_gpu / (_PUSH_SHARE * self.card.link)
        turns = _TURN_S + per_gpu / _TURN_RATE + self._freeing if rollout.sleep == "always" else 0.0
        return _ORDERS_S + per_gpu / _PUSH_SHARED + turns

    @property
    def _freeing(self) -> float:
        """Seconds in which the learner's ranks free memory that only scoring and update need."""
        learner = LearnerMemory.of(self.config, self.shape, [self.card.num_bytes])
        given_back = learner.most - sum(learner.resident.values())
        return self.config.learner.world_size * given_back / _FREEING_RATE

    @property
    def _trained(self) -> int:
        lora = self.config.model.lora
        return self.shape.num_parameters if lora is None else self.shape.num_adapters(lora.targets, lora.rank)

    @property
    def _tokens(self) -> tuple[float, float]:
        """Tokens that a rank computes in a pass, and how many of them need log-probs.

        A shared prompt is computed once for the answers to it in a micro-batch.
        """
        actor = self.config.actor
        rows = self.num_rows / self.config.learner.world_size
        together = max(1, (actor.ppo_max_token_len_per_gpu - self.prompt) // self.response)
        samples = self.config.rollout.n
        # A group that is too long for a micro-batch goes into several, each with its prompt.
        copies = 1.0 if actor.shared_prompts == "off" else samples / math.ceil(samples / together)
        return rows * (self.prompt / copies + self.response), rows * self.response

    @property
    def _steps(self) -> int:
        """Optimizer steps of a pass over the batch."""
        return math.ceil(self.config.data.train_batch_size / self.config.actor.ppo_mini_batch_size)

    @property
    def _micro_batches(self) -> int:
        """A rank's micro-batches of a pass over the batch."""
        per_step = self._tokens[0] / self._steps / self.config.actor.ppo_max_token_len_per_gpu
        return self._steps * math.ceil(per_step)

    def _pass(self, *, forward: float, moved: float) -> float:
        """Returns seconds of a pass over the batch."""
        shape, compiled = self.shape, self.config.actor.compiles
        computed, scored = self._tokens
        pairs = self.prompt + self.response / 2
        # Attention: two operations for each channel of a key, and two for each of a value.
        layers = 2 * shape.active_layers + 4 * shape.num_layers * shape.attention_width * pairs
        head = 2 * shape.vocab * shape.hidden
        if self.config.model.lora is not None and forward > 1.0:
            forward -= 1.0  # frozen matrices have no gradient of their own
        arithmetic = forward * (layers * computed + head * scored) / self._products_per_s
        moving = moved * self._moved_by_token * self._width / 2 * computed / self.card.bandwidth
        layer_passes = forward * self._micro_batches * shape.num_layers
        num_experts = shape.num_experts / self.config.learner.num_expert_ranks
        by_expert = layer_passes * num_experts * _LAUNCH_PER_EXPERT_S
        if compiled:
            return arithmetic + moving + layer_passes * _LAUNCH_COMPILED_S + by_expert
        return max(arithmetic + moving, layer_passes * _LAUNCH_S) + by_expert

    @property
    def _moved_by_token(self) -> float:
        """Bytes that all layers move for a token in half precision; divided experts are not compiled."""
        shape, compiled = self.shape, self.config.actor.compiles
        with_experts = compiled and self.config.learner.num_expert_ranks == 1
        experts = shape.of_experts(compiled=with_experts)
        rest = shape.activations(compiled=compiled) - shape.of_experts(compiled=compiled)
        return shape.num_layers * (_MOVED[compiled] * rest + _MOVED[with_experts] * experts)

    def _between_ranks(self) -> float:
        """Returns the seconds of gathers, reductions and exchanges that do not overlap computation.

        Divided experts and matrices are gathered and reduced by the ranks that have the same parts.
        """
        learner, memory, steps = self.config.learner, self.config.actor.memory, self._steps
        shards, replicas = learner.num_shards, learner.world_size // learner.num_shards
        gathers = steps if memory.keeps_gathered else 2 * self._micro_batches
        reductions = steps if memory.accumulates else self._micro_batches
        reduced = self._trained * reductions
        numbers = (self.shape.num_parameters * gathers + reduced) * (shards - 1) / shards
        numbers += 2 * reduced / shards * (replicas - 1) / replicas  # an all-reduce of the shards
        trained = reductions if self.config.model.lora is None else 0
        if (tensor := learner.tensor_parallel) > 1:
            gathered = self.shape.num_layers * self.shape.divided(tensor) * (gathers + trained)
            numbers -= gathered * (tensor - 1) / tensor
            tokens = self._tokens[0] * self.shape.hidden
            numbers += _TOKEN_GATHERS * self.shape.num_layers * tokens * (tensor - 1)
        elsewhere = (learner.num_expert_ranks - 1) / learner.num_expert_ranks
        if self.shape.num_experts and elsewhere:
            with_experts = self.shape.num_layers - self.shape.num_dense
            numbers -= with_experts * self.shape.experts * (gathers + trained) * elsewhere
            rows = self._tokens[0] * self.shape.num_chosen * self.shape.hidden
            numbers += _EXCHANGES * with_experts * rows * elsewhere
        return _EXPOSED * self._width * numbers / self.card.link
