"""Compiles the layers on dummy tokens after the learner has loaded, while engines start.

The graphs are those of the steps: with a backward pass for policy and critic, without gradients for frozen
networks. Kernels are chosen for a micro-batch of the configured size, not for the first step's lengths.
Parameters, gradients and random numbers stay as they were.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np
import torch
from torch._dynamo.exc import TorchDynamoException

from paceline.config.run import RunConfig
from paceline.learner.batch.pack import pack
from paceline.learner.batch.planning.plan import effective_budget
from paceline.learner.batch.types import MicroBatch, PackedRow
from paceline.learner.distributed.engine_memory import GpuMemory
from paceline.learner.distributed.ranks import Ranks
from paceline.learner.model.architectures import UncompilableError
from paceline.learner.model.decoder.compiling import TOKEN_MULTIPLE
from paceline.learner.model.decoder.experts import recorded_choices, routers
from paceline.learner.model.loading import forget_forward_passes
from paceline.learner.model.networks import PolicyNetwork, TokenScores, ValueNetwork, body_of, first_layers
from paceline.learner.train.state.learner import Learner
from paceline.learner.train.stopwatch import GIB

log = logging.getLogger(__name__)


def load_warm(config: RunConfig, ranks: Ranks, notify: Callable[[str], None]) -> Learner:
    """Returns a learner that can train; every rank calls it. Raises as `Learner.load`.

    An engine may be starting on this GPU. So layers are compiled before AdamW's averages exist, and
    compilation's memory is freed before they are made. If `actor.compile` is auto and the compiler fails, or
    the model has no compiled form, the learner is loaded again without it.
    """
    reason = ""
    chosen = config.with_compile(on_gpu=ranks.device.type == "cuda")
    try:
        learner = _loaded_and_warm(chosen, ranks, notify)
    except (TorchDynamoException, UncompilableError) as error:
        if config.actor.compile != "auto":
            raise
        reason = _first_line(error)
    if reason:  # outside of the except clause, because the error's traceback holds the first learner
        notify(
            f"layers cannot be compiled here ({reason}); the learner runs them uncompiled, more slowly: "
            "actor.compile: false skips this attempt"
        )
        GpuMemory(ranks.device).give_back()
        learner = _loaded_and_warm(config.changed(actor={"compile": False}), ranks, notify)
    learner.make_averages()
    return learner


def _loaded_and_warm(config: RunConfig, ranks: Ranks, notify: Callable[[str], None]) -> Learner:
    learner = Learner.load(config, ranks, notify)
    log.info("rank %d of %d holds its shards on %s", ranks.world.rank, ranks.world.size, ranks.device)
    warm_up(learner)
    GpuMemory(ranks.device).give_back()
    return learner


def _first_line(error: Exception) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)


def warm_up(learner: Learner) -> None:
    """Runs a layer of every kind once, forward and backward; every rank calls it.

    Does nothing without compiled layers.
    """
    if learner.compile_clock is None:
        return
    _all_networks(learner)
    compilations, most = learner.compile_clock.take(), GpuMemory(learner.ranks.device).peak
    log.info(
        "before the first step, %s%s",
        compilations,
        f"; {most / GIB:.1f} GiB of tensors at most" if most else "",
    )


def _all_networks(learner: Learner) -> None:
    policy, critic = learner.actor.network, learner.critic
    batch = _batch(learner)
    with first_layers(body_of(policy.lm)):
        _pass(policy, batch)
        if routers(policy.lm):
            # Updates record the chosen experts, in a separate graph.
            with recorded_choices(policy.lm):
                _pass(policy, batch)
    if critic is not None:
        with first_layers(critic.network.body):
            _pass(critic.network, batch)
    for frozen in learner.frozen.values():
        network = frozen.network
        with torch.no_grad(), frozen.present(), first_layers(body_of(network.lm)):
            _pass(network, batch)


def _pass(network: PolicyNetwork | ValueNetwork, batch: MicroBatch) -> None:
    output = network(batch)
    total = (output.log_probs if isinstance(output, TokenScores) else output).sum()
    if total.requires_grad:
        torch.autograd.backward(total)
        network.zero_grad(set_to_none=True)
    forget_forward_passes(network)


def _batch(learner: Learner) -> MicroBatch:
    """Makes a full micro-batch of short rows, each with one response token.

    Positions stay low, because long rows change some rotary embeddings permanently.
    """
    config, device = learner.config, learner.ranks.device
    budget = effective_budget(config.micro_batch_tokens, device.type, config.max_model_len)
    row = PackedRow.unsampled(0, np.zeros(TOKEN_MULTIPLE - 1, np.int32), np.zeros(1, np.int32))
    return pack([row] * max(1, budget // TOKEN_MULTIPLE), device)
