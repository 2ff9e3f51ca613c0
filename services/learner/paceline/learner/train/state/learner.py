"""The state of a learner rank: networks, optimizers, KL controller, guard histories, version."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from paceline.algorithms.kl import AdaptiveKLController, FixedKLController, KLController
from paceline.config.run import RunConfig
from paceline.config.training.actor import OptimConfig
from paceline.config.training.algorithm import REFERENCE
from paceline.core.guard import Histories
from paceline.core.samples.images import ImageSpec
from paceline.learner.distributed.catching_up import count_collectives
from paceline.learner.distributed.collectives import broadcast_bytes
from paceline.learner.distributed.ranks import Ranks
from paceline.learner.model.decoder import flash_attention
from paceline.learner.model.decoder.compiling import CompileClock
from paceline.learner.model.decoder.experts import correction_parameters, routers
from paceline.learner.model.decoder.layers import LayerOptions
from paceline.learner.model.loading import (
    Precision,
    digest_of_frozen,
    frozen,
    hugging_face_names,
    load_critic,
    load_policy,
)
from paceline.learner.model.networks import PolicyNetwork, ValueNetwork
from paceline.learner.train.algorithm import try_algorithm
from paceline.learner.train.state.ahead import WorkAhead
from paceline.learner.train.state.frozen import FrozenNetwork
from paceline.learner.train.state.memory import MemoryRoom
from paceline.learner.train.state.optimizer import N, Optimizer, Trainable
from paceline.learner.train.state.schedule import Schedule
from paceline.learner.train.state.shared_prompts import SharedPrompts
from paceline.models.facts import family_of
from paceline.models.model_shape import num_experts_of

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(kw_only=True, slots=True, eq=False)
class Learner:
    """A rank's part of everything that trains; `version` counts training steps.

    `base_digest` is the digest of the frozen weights, which no checkpoint holds; "" without any.
    `frozen` are the networks that only score, by the names of their log-probs, in scoring order. With
    adapters, the reference is the policy's own network without them.
    """

    config: RunConfig
    ranks: Ranks
    actor: Trainable[PolicyNetwork]
    critic: Trainable[ValueNetwork] | None
    kl_controller: KLController
    histories: Histories
    shared_prompts: SharedPrompts
    memory: MemoryRoom
    ahead: WorkAhead
    base_digest: str = ""
    frozen: Mapping[str, FrozenNetwork] = field(default_factory=dict)
    compile_clock: CompileClock | None = None
    version: int = 0

    @property
    def vocab_size(self) -> int:
        """Number of token ids that the policy knows."""
        return int(self.actor.network.lm.config.get_text_config().vocab_size)  # type: ignore[union-attr, operator]

    @property
    def image_spec(self) -> ImageSpec | None:
        """The image inputs of the policy; None if it takes only text."""
        config: Any = self.actor.network.lm.config
        return ImageSpec.of(config) if family_of(config.model_type).takes_images else None

    @classmethod
    def build(cls, config: RunConfig, ranks: Ranks, notify: Callable[[str], None] = log.warning) -> Learner:
        """Builds a learner at version 0 that can train: `load`, then the optimizers' averages."""
        learner = cls.load(config, ranks, notify)
        learner.make_averages()
        return learner

    @classmethod
    def load(cls, config: RunConfig, ranks: Ranks, notify: Callable[[str], None] = log.warning) -> Learner:
        """Loads the networks of a run at version 0; every rank calls it. `notify` notifies the user.

        Its optimizers have no averages yet.

        Raises:
            ConfigError: the user's own code is missing or cannot be trained with, adapters do not fit the
                model, or load balancing is configured for a model without experts.
            EnvironmentLackError: the configured attention kernel is not installed.
            ModelError: the model folder is unusable.
        """
        try_algorithm(config)  # finds errors in the user's code before loading
        seed, model = config.trainer.seed, config.model
        random_weights = model.load_format == "random"
        compute = DTYPES[model.dtype]
        options = LayerOptions.of_actor(config.actor, ranks)
        flash_attention.choose(config.actor.attention_kernel)
        # A frozen network is stored in its compute type.
        kept = Precision(compute=compute, store=compute, reduce=DTYPES[config.actor.reduce_dtype])
        masters = dataclasses.replace(kept, store=torch.float32)
        policy = load_policy(
            model.path,
            ranks,
            masters if model.lora is None else kept,
            options=options,
            random_seed=random_seed(config),
            lora=model.lora,
            adapter_seed=seed,
            vision=model.vision.train,
        )
        config.actor.require_experts(
            model.path,
            has_experts=bool(routers(policy.lm)),
            corrects_scores=bool(correction_parameters(policy.lm)),
        )
        lm: Any = policy.lm
        config.learner.require_experts(model.path, num_experts_of(lm.config.to_dict()))
        if config.actor.router_replay:
            policy.replay_choices()
        flash_attention.prepare(policy.lm.config, compute, ranks.device)
        critic = None
        if "critic" in config.needs:
            critic = load_critic(
                config.critic.path or model.path,
                ranks,
                masters,
                seed=seed,
                options=options,
                random_weights=random_weights,
            )
        learner = cls.around(config, ranks, policy, critic=critic, notify=notify)
        learner.base_digest = _digest(config, model.path, frozen(hugging_face_names(policy)), ranks)
        own = {
            name: _load_frozen(config, folder, ranks, kept, compiled=options.compiled)
            for name, folder in config.frozen_folders.items()
        }
        if config.actor.router_replay and REFERENCE in own:
            own[REFERENCE].network.replay_choices()
        learner.frozen = {name: own.get(name) or FrozenNetwork(policy) for name in config.frozen_networks}
        return learner

    def make_averages(self) -> None:
        """Creates the optimizers' averages for all networks that train."""
        for trainable in (self.actor, self.critic):
            if trainable is not None:
                trainable.optimizer.make_averages()

    @classmethod
    def around(
        cls,
        config: RunConfig,
        ranks: Ranks,
        policy: PolicyNetwork,
        *,
        critic: ValueNetwork | None = None,
        notify: Callable[[str], None] = log.warning,
    ) -> Learner:
        """Makes a learner at version 0 from networks that are already loaded; it has no averages yet."""
        kl = config.algorithm.kl_ctrl
        actor = _trainable(policy, config.actor.optim, config.actor.grad_clip, config, ranks)
        return cls(
            config=config,
            ranks=ranks,
            actor=actor,
            critic=None
            if critic is None
            else _trainable(critic, config.critic.optim, config.critic.grad_clip, config, ranks),
            kl_controller=AdaptiveKLController(kl.kl_coef, kl.target_kl, kl.horizon)
            if kl.type == "adaptive"
            else FixedKLController(kl.kl_coef),
            histories=Histories(window=config.guard.window, min_history=config.guard.min_history),
            shared_prompts=SharedPrompts(config.actor.shared_prompts, DTYPES[config.model.dtype], notify),
            memory=MemoryRoom(notify),
            ahead=WorkAhead(actor, ranks),
            compile_clock=CompileClock() if config.actor.compiles else None,
        )


def _load_frozen(
    config: RunConfig, folder: str, ranks: Ranks, precision: Precision, *, compiled: bool
) -> FrozenNetwork:
    """Loads a frozen network with its own weights, of any shape."""
    options, seed = LayerOptions(compiled=compiled), random_seed(config)
    network = load_policy(folder, ranks, precision, options=options, random_seed=seed)
    network.requires_grad_(False)
    flash_attention.prepare(network.lm.config, precision.compute, ranks.device)
    return FrozenNetwork(
        network,
        digest=_digest(config, folder, hugging_face_names(network), ranks),
        in_host_memory=config.actor.memory.offload_reference,
    )


def _digest(
    config: RunConfig, folder: str, parameters: Iterable[tuple[str, nn.Parameter]], ranks: Ranks
) -> str:
    """Returns the digest of a folder's frozen parameters, which rank 0 reads."""
    own = digest_of_frozen(folder, parameters, random_seed(config)) if ranks.world.rank == 0 else ""
    return broadcast_bytes(own.encode(), ranks).decode()


def random_seed(config: RunConfig) -> int | None:
    """Returns the seed of random weights; None if they are read."""
    return config.trainer.seed if config.model.load_format == "random" else None


def _trainable(
    network: N, optim: OptimConfig, grad_clip: float, config: RunConfig, ranks: Ranks
) -> Trainable[N]:
    return Trainable(
        network=network,
        collectives=count_collectives(network, ranks),
        accumulates=config.actor.memory.accumulates,
        keeps_gathered=config.actor.memory.keeps_gathered,
        optimizer=Optimizer(
            network,
            betas=optim.betas,
            eps=optim.eps,
            weight_decay=optim.weight_decay,
            muon_momentum=optim.momentum if optim.type == "muon" else None,
            compact=optim.type == "adamw_8bit",
            grad_clip=grad_clip,
            offloads=config.actor.memory.offloads,
        ),
        schedule=Schedule(
            peak=optim.lr,
            kind=optim.lr_scheduler,
            total_steps=config.trainer.num_steps,
            warmup_ratio=optim.warmup_steps_ratio,
            min_ratio=optim.min_lr_ratio,
            cycles=optim.lr_cycles,
        ),
    )
