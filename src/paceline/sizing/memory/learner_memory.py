"""Plans the memory of a learner rank on its GPU, by phase, from config.json and the configuration."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from paceline.config.model import ModelConfig
from paceline.config.run import RunConfig
from paceline.config.training.memory import KEPT_LOGITS_SHARE
from paceline.core.errors import ModelError
from paceline.core.policy import TrainedVision
from paceline.engines.memory import CONTEXT, GIB, Parts
from paceline.models.facts import config_tree
from paceline.models.model_shape import ModelShape
from paceline.sizing.compiled_layers import kept_bytes
from paceline.storage.models import local_folder

OFFLOADED = GIB
"""Bytes of averages on the GPU at a time, if they are kept in host memory."""
MUON_BYTES = 28
"""Bytes per number of a matrix that a rank orthogonalizes: what it receives, computes and sends."""
COMPACT_STEP = 640 << 20
"""Bytes of the slice of 8-bit averages that is in float32 at a time, and of its conversion to codes."""
LOGITS = GIB
"""Chunks of logits and the head's gradient; the learner bounds them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LearnerMemory:
    """Plans the memory of a learner's rank.

    Args:
        shape: shape of the policy, and of a critic if it is in use.
        num_shards: ranks that share one copy of weights and optimizer.
        bytes_per_gradient: bytes per number of the type in which gradients are summed.
        num_tokens: number of tokens of a micro-batch on a rank, with the patches of its images.
        context: ranks that share the tokens of a micro-batch; each computes all of its images.
        expert: ranks over which the experts of a layer are divided; each is assumed to get as many tokens.
        tensor: ranks over which the matrices of a layer are divided.
        kept_share: share of the activations that the update keeps.
        keeps_gathered: whether weights stay gathered within a mini-batch.
        accumulates: whether a rank adds up whole gradients.
        offloads: whether the optimizers' averages are in host memory.
        inputs_on_host: whether recomputed layers keep their inputs in host memory.
        host_limit: most bytes of host memory for these inputs; None: as many as they need.
        compact: whether the policy's averages have 8 bits.
        critic_compact: whether the critic's averages have 8 bits.
        frozen: the shapes of frozen networks with separate weights, by name.
        offloads_frozen: whether each frozen network is in host memory except while it scores.
        num_adapters: number of parameters in the policy's adapters, if only these train; else 0.
        num_adapted: number of parameters in the matrices that have adapters.
        num_stacked: number of parameters in the adapters of experts.
        num_merged: number of parameters of a layer's experts that have adapters, which a pass merges.
        vision: the part of the policy's vision tower that trains.
        gpu_bytes: bytes of the largest GPU; 0 if it is not known.
    """

    shape: ModelShape
    num_shards: int
    bytes_per_number: int
    bytes_per_gradient: int
    num_tokens: int
    kept_share: float
    compiled: bool
    keeps_gathered: bool
    accumulates: bool
    offloads: bool
    has_critic: bool
    frozen: Mapping[str, ModelShape] = field(default_factory=dict)
    offloads_frozen: bool = False
    inputs_on_host: bool = False
    host_limit: int | None = None
    num_adapters: int = 0
    num_adapted: int = 0
    num_stacked: int = 0
    num_merged: int = 0
    has_images: bool = False
    vision: TrainedVision = "none"
    context: int = 1
    expert: int = 1
    tensor: int = 1
    gpu_bytes: int = 0
    muon: bool = False
    critic_muon: bool = False
    compact: bool = False
    critic_compact: bool = False

    @classmethod
    def of(cls, config: RunConfig, shape: ModelShape, totals: Collection[int] = ()) -> LearnerMemory:
        """Plans the memory of a run; micro-batches are assumed to be as large as its settings allow.

        Args:
            totals: bytes of the GPUs whose size is known.
        """
        actor = config.with_compile(on_gpu=True).actor
        sequences = actor.ppo_mini_batch_size * config.rollout.n
        most = -(-sequences // config.learner.num_data_ranks) * longest_row(config, shape)
        lora = config.model.lora
        adapted = shape.matrices(lora.targets) if lora else []
        experts = [part for part in adapted if part.is_expert]  # such layers are not compiled
        return cls(
            shape=shape,
            num_shards=config.learner.num_shards,
            bytes_per_number=2 if config.model.dtype == "bfloat16" else 4,
            bytes_per_gradient=2 if actor.reduce_dtype == "bfloat16" else 4,
            num_tokens=min(actor.ppo_max_token_len_per_gpu, most),
            kept_share=actor.memory.kept_share,
            compiled=actor.compiles and not experts,
            keeps_gathered=actor.memory.keeps_gathered,
            accumulates=actor.memory.accumulates,
            offloads=actor.memory.offloads,
            has_critic="critic" in config.needs,
            frozen=frozen_shapes(config, shape),
            offloads_frozen=actor.memory.offload_reference,
            inputs_on_host=actor.memory.inputs_on_host,
            host_limit=actor.memory.host_limit,
            num_adapters=0 if lora is None else shape.num_adapters(lora.targets, lora.rank),
            num_adapted=0 if lora is None else shape.num_adapted(lora.targets),
            num_stacked=sum(part.num_adapters(lora.rank) for part in experts) if lora else 0,
            num_merged=sum(part.size for part in experts) // max(1, shape.num_layers - shape.num_dense),
            has_images=has_images(config),
            vision=config.model.vision.train,
            context=config.learner.num_context_ranks,
            expert=config.learner.num_expert_ranks,
            tensor=config.learner.tensor_parallel,
            gpu_bytes=max(totals, default=0),
            muon=actor.optim.type == "muon",
            critic_muon=config.critic.optim.type == "muon",
            compact=actor.optim.type == "adamw_8bit",
            critic_compact=config.critic.optim.type == "adamw_8bit",
        )

    @property
    def resident(self) -> Parts:
        """Memory used in all phases: sharded float32 weights and averages, and frozen weights in their own
        type.

        With adapters the policy is frozen, and the reference is the policy without them. A vision tower is
        kept like the network around it, and has averages only of what trains.
        """
        shard, trained = self._share(self.shape.num_parameters), self._share(self._num_in_language_model)
        tower = self._share(self.shape.num_in_tower)
        critic = shard if self.has_critic else 0
        frozen = self.bytes_per_number * (shard + tower) if self.num_adapters else 4 * tower
        frozen += 0 if self.offloads_frozen else sum(self._frozen.values())
        return {
            "context": CONTEXT,
            "weights": 4 * (trained + critic + (tower if self.has_critic else 0)) + frozen,
            "optimizer": OFFLOADED if self.offloads else self._averages,
        }

    @property
    def _averages(self) -> int:
        """Bytes of the averages: AdamW keeps two per number, Muon one, except for adapters of experts.

        In 8 bits, two of them take 65 / 32 bytes with their scales; the scales of adapters take more.
        """
        matrices = self.shape.num_in_matrices
        adapters = self.num_adapters - self.num_stacked
        of_muon = (adapters if self.num_adapters else matrices) if self.muon else 0
        trained = self._num_trained
        if self.has_critic:
            trained += self.shape.num_parameters
            of_muon += matrices if self.critic_muon else 0
        compact = self._num_trained if self.compact and not self.num_adapters else 0
        compact += self.shape.num_parameters if self.has_critic and self.critic_compact else 0
        saved = 4 * self._share(of_muon) + 191 * self._share(compact) // 32
        return 8 * self._share(trained) - saved

    @property
    def scoring(self) -> Parts:
        """Old log-probs, frozen networks and values are computed in turn; the largest need counts.

        Activations are those of one layer; for compiled policy and critic, those of the update's graph.
        """
        activations = self._activations if self.compiled else self._layer + self._exchanged
        visiting = self._frozen if self.offloads_frozen else {}
        visitor = max(visiting, key=lambda name: visiting[name], default="")
        frozen = [self.changed(shape=shape, keeps_gathered=False) for shape in self.frozen.values()]
        return {
            **self.resident,
            **({visitor: visiting[visitor]} if visitor else {}),
            "gathered": max(plan._gathered for plan in (self, *frozen)),
            "activations": max(
                activations + self._logits,
                self._tower_kept + self._of_images,
                *(max(plan._layer + plan._logits, plan._of_images) for plan in frozen),
            ),
        }

    @property
    def update(self) -> Parts:
        """Forward and backward of one network, or its optimizer step, whichever needs more."""
        backward = {
            **self.resident,
            "gradients": self._gradients,
            "gathered": self._gathered,
            "activations": self._tower_kept + max(self._activations + self._logits, self._of_images),
        }
        return max(backward, self._optimizer_step, key=lambda parts: sum(parts.values()))

    @property
    def _optimizer_step(self) -> Parts:
        """Gradients are float32 shards by now; averages that are kept in host memory come in parts."""
        numbers = max(self._num_trained, self.shape.num_parameters if self.has_critic else 0)
        visitors = {}
        if self.offloads and not self.num_adapters:
            # Two parts are on the GPU at a time. A part has at least one parameter, so the largest may exceed
            # OFFLOADED.
            visitors = {"visiting": max(0, 12 * self._share(self.shape.largest) - OFFLOADED)}
        if self.muon or (self.has_critic and self.critic_muon):
            visitors["matrix"] = MUON_BYTES * self.shape.largest_matrix
        if self.compact or (self.has_critic and self.critic_compact):
            visitors["slice"] = COMPACT_STEP
        return {**self.resident, "gradients": 4 * self._share(numbers), **visitors}

    @property
    def push(self) -> Parts:
        """Memory of a push: adapters are merged in place, and the old weights are kept to be restored."""
        merged = {"merged": self.bytes_per_number * self._share(self.num_adapted)}
        return {**self.resident, **(merged if self.num_adapters else {})}

    @property
    def start(self) -> Parts:
        """Memory while layers are compiled, a few at a time, before averages exist; else `resident`."""
        if not self.compiled:
            return self.resident
        numbers = self._in_flight
        return {
            **self.resident,
            "optimizer": 0,
            "gradients": self.bytes_per_gradient * numbers + 4 * self._share(numbers),
            "gathered": self.bytes_per_number * (numbers + self.shape.num_in_tower),
            "activations": 2 * self._layer + LOGITS,
        }

    def kept_beside(self, config: RunConfig) -> int:
        """Returns the learner's bytes, with both sides' staging, while an engine starts or is awake."""
        stays = sum(self.resident.values()) + 2 * (config.weights.staging_mib << 20)
        return max(stays, sum(self.start.values()))

    def changed(self, **fields: Any) -> LearnerMemory:
        """Returns a copy with other values."""
        return replace(self, **fields)

    @property
    def most(self) -> int:
        """Bytes of the phase that needs the most."""
        return max(sum(self.scoring.values()), sum(self.update.values()))

    @property
    def _frozen(self) -> Parts:
        """Returns this rank's shares of the frozen networks, by name."""
        return {
            name: self.bytes_per_number * self._share(shape.num_parameters + shape.num_in_tower)
            for name, shape in self.frozen.items()
        }

    @property
    def _num_trained(self) -> int:
        """Number of the policy's parameters that train."""
        tower = self.shape.tower
        return self._num_in_language_model + (tower.num_trained(self.vision) if tower else 0)

    @property
    def _num_in_language_model(self) -> int:
        """Number of parameters that train, without those of a vision tower."""
        return self.num_adapters or self.shape.num_parameters

    def _share(self, numbers: int) -> int:
        return -(-numbers // self.num_shards)

    @property
    def _gradients(self) -> int:
        """Bytes of whole gradients, or of this rank's share and of the layers that are being reduced."""
        tower = self._num_trained - self._num_in_language_model
        numbers, in_flight = self._num_gathered + tower, self._in_flight + tower
        if not self.has_critic and self.num_adapters:
            numbers, in_flight = self.num_adapters, 2 * self.num_adapters // self.shape.num_layers
        if self.accumulates:
            return self.bytes_per_gradient * numbers
        return 4 * self._share(numbers) + self.bytes_per_gradient * in_flight

    @property
    def _gathered(self) -> int:
        """Bytes of gathered weights: the whole model, or embedding, head and two layers; and the tower.

        A layer's experts with adapters are merged, and in the backward pass have a gradient of that size.
        """
        number = self._num_gathered if self.keeps_gathered else self._in_flight
        merged = 2 * self.num_merged // self.expert
        return self.bytes_per_number * (number + self.shape.num_in_tower + merged)

    @property
    def _num_gathered(self) -> int:
        """Number of the parameters that a rank gathers in a pass: all but other ranks' parts."""
        shape = self.shape
        elsewhere = (shape.num_layers - shape.num_dense) * self._experts_elsewhere
        return shape.num_parameters - elsewhere - shape.num_layers * self._matrices_elsewhere

    @property
    def _in_flight(self) -> int:
        layer = self.shape.layer - self._experts_elsewhere - self._matrices_elsewhere
        return self.shape.root + 2 * layer

    @property
    def _experts_elsewhere(self) -> int:
        """Number of the parameters of a layer's experts that a rank does not gather."""
        return self.shape.experts * (self.expert - 1) // self.expert

    @property
    def _matrices_elsewhere(self) -> int:
        """Number of the parameters of a layer's divided matrices that a rank does not gather."""
        return self.shape.divided(self.tensor) * (self.tensor - 1) // self.tensor

    @property
    def _of_images(self) -> int:
        """Bytes of the tower's activations in a micro-batch of images, which are freed before the layers'."""
        tower = self.shape.tower
        return 0 if tower is None else tower.activations(self._num_patches, self.bytes_per_number)

    @property
    def _tower_kept(self) -> int:
        """Bytes that the tower keeps for its backward pass; scoring drops them before the layers compute."""
        tower = self.shape.tower
        if tower is None:
            return 0
        return tower.kept(self._num_patches, self.bytes_per_number, self.vision, self.kept_share)

    @property
    def _num_patches(self) -> int:
        """Number of patches in a micro-batch of images.

        A token stands for `patches_per_token` patches, and both count in the budget.
        """
        tower = self.shape.tower
        if tower is None or not self.has_images:
            return 0
        num_tokens = self.context * self.num_tokens
        return num_tokens * tower.patches_per_token // (1 + tower.patches_per_token)

    @property
    def _logits(self) -> int:
        """Bytes of logits: those of a chunk, and those of all tokens if the learner keeps them."""
        logits = self.num_tokens * self.shape.vocab * self.bytes_per_number
        return LOGITS + (logits if logits <= KEPT_LOGITS_SHARE * self.gpu_bytes else 0)

    @property
    def _activations(self) -> int:
        """Bytes in all layers: inputs of recomputing layers, one such layer in full, and what others keep."""
        if self.compiled and self.kept_share:
            return self.shape.num_layers * self._compiled_layer + self._exchanged
        recomputed = round((1.0 - self.kept_share) * self.shape.num_layers)
        # The inputs of two layers are on the GPU as well as on the host.
        inputs = (recomputed - max(0, self._num_inputs_on_host - 2)) * self.layer_input
        kept = (self.shape.num_layers - recomputed + (1 if recomputed else 0)) * self._layer
        return inputs + kept + self._exchanged + recomputed * self._rows_order

    @property
    def _compiled_layer(self) -> int:
        """Bytes that a compiled layer keeps.

        Divided experts are not compiled. With divided matrices, the compiler gets only the short pieces
        between them, and is not expected to drop anything.
        """
        if self.tensor > 1:
            return self._layer
        experts = self._by_token(self.shape.of_experts(compiled=False)) if self.expert > 1 else 0
        return round(kept_bytes(self.kept_share) * (self._layer - experts)) + experts

    @property
    def _rows_order(self) -> int:
        """Bytes of the order of a layer's rows for experts, which a recomputed layer takes again."""
        return 0 if self.expert == 1 else 8 * self.num_tokens * self.shape.num_chosen

    @property
    def _exchanged(self) -> int:
        """Bytes of a layer's tokens that are on their way to experts and back."""
        if self.expert == 1 or not self.shape.num_experts:
            return 0
        return 2 * self.num_tokens * self.shape.num_chosen * self.shape.hidden * self.bytes_per_number

    @property
    def layer_input(self) -> int:
        """Bytes of the states that enter a layer."""
        return self.num_tokens * self.shape.hidden * self.bytes_per_number

    @property
    def host_inputs(self) -> int:
        """Bytes of host memory that a rank pins for inputs of layers."""
        return self._num_inputs_on_host * self.layer_input

    @property
    def _num_inputs_on_host(self) -> int:
        if not self.inputs_on_host:
            return 0
        most = self.shape.num_layers if self.host_limit is None else self.host_limit // self.layer_input
        return min(self.shape.num_layers, most)

    @property
    def _layer(self) -> int:
        """Bytes of activations of one layer that keeps them.

        Attention and MLP with divided matrices also keep the states of the other ranks' tokens.
        """
        numbers = self.shape.activations(compiled=self.compiled)
        if self.compiled and self.expert > 1:  # the experts are not
            numbers += self.shape.of_experts(compiled=False) - self.shape.of_experts(compiled=True)
        return self._by_token(numbers) + 2 * (self.tensor - 1) * self.layer_input

    def _by_token(self, numbers: int) -> int:
        """Returns the bytes of this many numbers for each token."""
        return self.num_tokens * self.bytes_per_number * numbers


def frozen_shapes(config: RunConfig, shape: ModelShape) -> dict[str, ModelShape]:
    """Returns the shapes of a run's frozen networks with separate weights, by name.

    If a config.json is missing, or has unknown names for its sizes, the policy's shape is used.
    """
    networks = config.algorithm.networks
    return {
        name: (_shape_in(networks[name].path, config.model) if name in networks else None) or shape
        for name in config.frozen_folders
    }


def _shape_in(place: str, model: ModelConfig) -> ModelShape | None:
    try:
        return ModelShape.of(config_tree(local_folder(place, model, weights=False)))
    except ModelError:
        return None  # the checks say what is wrong with it


def has_images(config: RunConfig) -> bool:
    """Returns whether prompts may have images."""
    return config.data.image_key is not None


def longest_row(config: RunConfig, shape: ModelShape, context: int | None = None) -> int:
    """Returns the tokens of a run's longest row on a rank, with the patches of its images.

    Args:
        context: ranks that share the row (default: as configured).
    """
    patches = shape.num_patches(config.data.max_prompt_length) if has_images(config) else 0
    return -(-(config.max_model_len + patches) // (context or config.learner.num_context_ranks))
