"""Steps in which ranks run out of memory, at a chosen place of a chosen pass."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from paceline.algorithms.policy_losses import LossInputs, LossOutputs
from paceline.algorithms.statistics import masked_mean
from paceline.learner.distributed.mesh import room_for
from paceline.learner.distributed.ranks import Ranks
from paceline.learner.model.decoder import compiling
from paceline.learner.model.networks import body_of, decoder_layers
from paceline.learner.train.scoring import score_step
from paceline.learner.train.state.learner import Learner
from support.learner_fakes import run_config
from support.learner_scenarios import numbers, take_step

PLACES = ("first layer, forwards", "last layer, forwards", "last layer, backwards", "first layer, backwards")
GROUPS = {"adv_estimator": "grpo", "use_kl_in_reward": False, "kl_ctrl": {"type": "fixed", "kl_coef": 0.1}}


class _Failing(torch.autograd.Function):
    """The identity, whose backward pass runs out of memory."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, due: Any) -> torch.Tensor:
        ctx.due = due
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        if ctx.due():
            raise torch.OutOfMemoryError("CUDA out of memory (made up)")
        return gradients[0], None


@contextmanager
def failing_to_send(due: Callable[[], bool]) -> Iterator[None]:
    """Runs out of memory where there would have to be room for tokens of other ranks."""

    def room(rows: torch.Tensor, num_rows: int) -> torch.Tensor:
        if due():
            raise torch.OutOfMemoryError("CUDA out of memory (made up)")
        return room_for(rows, num_rows)

    with patch("paceline.learner.distributed.catching_up.room_for", room):
        yield


@contextmanager
def in_updates(learner: Learner) -> Iterator[Callable[[], bool]]:
    """Yields whether a pass has a graph and, where a learner scores with a graph, belongs to an update."""
    if not learner.config.actor.compiles:
        yield torch.is_grad_enabled
        return
    is_scoring = False

    def scored(*arguments: Any) -> Any:
        nonlocal is_scoring
        is_scoring = True
        try:
            return score_step(*arguments)
        finally:
            is_scoring = False

    with patch("paceline.learner.train.step.score_step", scored):
        yield lambda: torch.is_grad_enabled() and not is_scoring


@contextmanager
def out_of_memory(learner: Learner, place: str, passes: set[int]) -> Iterator[list[int]]:
    """Runs out of memory in these passes with a graph, counted from 0; yields the rows of each pass.

    "tokens" is where a rank has announced its tokens to the ranks of their experts, and not sent them.
    """
    layers = decoder_layers(body_of(learner.actor.network.lm))
    layer = layers[0] if place.startswith("first") else layers[-1]
    sizes: list[int] = []
    states: list[weakref.ref[torch.Tensor]] = []

    def due() -> bool:
        return len(sizes) - 1 in passes and sizes[-1] > 0  # a filler always fits

    def count(network: Any, arguments: tuple[Any, ...]) -> None:
        if is_update():
            sizes.append(len(arguments[0].rows))
            gc.collect()
            # What the pass before held is gone before the next one needs room.
            assert not any(state() is not None for state in states)
            states.clear()

    @torch.compiler.disable
    def fail(module: Any, arguments: Any, output: Any) -> Any:
        if not is_update() or place == "tokens":
            return output
        states.append(weakref.ref(output))
        if place.endswith("backwards"):
            return _Failing.apply(output, due)
        if due():
            raise torch.OutOfMemoryError("CUDA out of memory (made up)")
        return output

    hooks = [
        learner.actor.network.register_forward_pre_hook(count),
        layer.mlp.register_forward_hook(fail),
    ]
    gc.collect()
    gc.freeze()  # what exists by now is not looked at again, neither here nor in later collections
    try:
        with failing_to_send(due if place == "tokens" else bool), in_updates(learner) as is_update:
            yield sizes
    finally:
        for hook in hooks:
            hook.remove()


def build(ranks: Ranks, model: str, notes: list[str], **actor: Any) -> Learner:
    """A run of two mini-batches with several micro-batches each."""
    fixed = {"ppo_max_token_len_per_gpu": 96, "ratio_audit_freq": 100, "shared_prompts": "off"}
    settings = fixed | actor
    with patch.object(compiling, "BACKEND", "eager"):
        return Learner.build(run_config(Path(model), algorithm=GROUPS, actor=settings), ranks, notes.append)


def bits(learner: Learner) -> list[list[float]]:
    """This rank's parameters and optimizer states."""
    tensors = [*learner.actor.network.parameters(), *learner.actor.optimizer.state().values()]
    return [
        (tensor.to_local() if hasattr(tensor, "to_local") else tensor).detach().flatten().tolist()
        for tensor in tensors
    ]


def one_rank_runs_out(
    ranks: Ranks, model: str, *places: str, with_third: bool = True, **actor: Any
) -> list[Any]:
    """By place: notes, sizes of passes, the disturbed second step's metrics and bits, a third's metrics.

    The last entry is of a run in which each rank fails at once, before any pass has left a trace.
    """
    results: list[Any] = []
    last = ranks.world.size - 1
    for place in (*(places or PLACES), "all"):
        notes: list[str] = []
        learner = build(ranks, model, notes, **actor)
        take_step(learner, 1)
        everywhere = place == "all"
        passes = {0} if everywhere else {1} if ranks.world.rank == last else set[int]()
        with out_of_memory(learner, PLACES[0] if everywhere else place, passes) as sizes:
            metrics = numbers(take_step(learner, 2))
        after_step = bits(learner)
        later, later_sizes = {}, []
        if with_third:
            with out_of_memory(learner, PLACES[0], set()) as later_sizes:
                later = numbers(take_step(learner, 3))
        results.append([notes, [sizes, later_sizes], metrics, after_step, later])
    return results


def ranks_that_share_rows(ranks: Ranks, kind: str, folder: str) -> list[Any]:
    """Metrics and bits of two undisturbed steps, then `one_rank_runs_out`, of a dense model or experts."""
    lean = {"recompute": "from_host", "keep_gathered": True, "accumulate": False}
    place, actor = {
        "dense": (PLACES[-1], {"memory": lean, "entropy_coeff": 0.01}),
        "experts": (PLACES[1], {"load_balance_coef": 0.1, "shared_prompts": "on"}),
        "divided experts": ("tokens", {}),
        "divided experts, recomputed": (PLACES[-1], {"memory": lean}),
        "compiled experts": (PLACES[2], {"compile": True}),
    }[kind]
    actor |= {"ppo_max_token_len_per_gpu": 48}  # several micro-batches for each group
    undisturbed = build(ranks, folder, [], **actor)
    metrics = [numbers(take_step(undisturbed, step)) for step in (1, 2)]
    disturbed = one_rank_runs_out(ranks, folder, place, with_third=False, **actor)
    return [metrics[1], bits(undisturbed), *disturbed]


def knows(inputs: LossInputs) -> LossOutputs:
    """A policy loss whose metrics say which groups and values it was given."""
    assert inputs.group_ids is not None
    assert inputs.values is not None
    groups = inputs.group_ids.double().square().unsqueeze(-1).expand(inputs.mask.shape)
    metrics = {"group": masked_mean(groups, inputs.mask), "value": masked_mean(inputs.values, inputs.mask)}
    return LossOutputs(-inputs.log_probs, metrics)


def known_by_a_loss(
    ranks: Ranks, model: str, failing: set[int], **sections: Any
) -> tuple[dict[str, float], Learner]:
    """A step of one mini-batch with the loss `knows`, out of memory in these passes of its update."""
    loss = {"type": "custom", "path": "support.memory_faults:knows"}
    actor = {"policy_loss": loss, "ppo_mini_batch_size": 8, "ratio_audit_freq": 100, "shared_prompts": "off"}
    sections["actor"] = actor | sections.get("actor", {})
    learner = Learner.build(run_config(Path(model), **sections), ranks, [].append)
    # Passes with a graph alone are counted, those of the update.
    with out_of_memory(learner, PLACES[0], failing):
        return numbers(take_step(learner, 1)), learner


def what_a_loss_knows(ranks: Ranks, model: str) -> list[Any]:
    """On all ranks: a step as it is, and one in which the last rank runs out of memory."""
    last = ranks.world.rank == ranks.world.size - 1
    actor = {"ppo_max_token_len_per_gpu": 96}
    return [
        known_by_a_loss(ranks, model, passes, actor=actor)[0] for passes in (set(), {1} if last else set())
    ]


def on_several_ranks(ranks: Ranks, model: str) -> list[Any]:
    """All scenarios of several ranks in one set of processes."""
    return [one_rank_runs_out(ranks, model), what_a_loss_knows(ranks, model)]


def one_rank_runs_out_with_gathered_weights(ranks: Ranks, model: str) -> list[Any]:
    """`one_rank_runs_out` where weights stay gathered and gradients are reduced every time."""
    memory = {"recompute": "from_host", "keep_gathered": True, "accumulate": False}
    return one_rank_runs_out(ranks, model, "first layer, backwards", memory=memory)
