"""Checks that the sections of a run's configuration agree; each check raises ValueError if they do not."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Final

from paceline.config.combined.derived import DerivedSettings
from paceline.config.training.policy_losses import CustomLoss, Distill
from paceline.config.validation import reward_key
from paceline.core.errors import ConfigError
from paceline.core.guard import Action

BYTES_PER_ROW: Final = 256
"""Most bytes per row in the learner's message: ids, a blob's key and digest, lengths and a score."""

BYTES_PER_TEACHER_DIGEST: Final = 34
"""What the digest of a served teacher's tokens adds."""


def _kl_can_be_steered(config: DerivedSettings) -> None:
    control, algorithm = config.algorithm.kl_ctrl, config.algorithm
    sequences = config.data.train_batch_size * config.rollout.n
    if algorithm.use_kl_in_reward and control.type == "adaptive" and 5 * control.horizon <= sequences:
        raise ValueError(
            f"algorithm.kl_ctrl.horizon={control.horizon} would let one step of {sequences} sequences "
            "(data.train_batch_size x rollout.n) lower the coefficient to 0 or below; raise it above "
            f"{sequences // 5}, or to {10 * sequences} for a fiftieth per step"
        )


def _there_are_rows(config: DerivedSettings) -> None:
    service = config.rollout.environment
    if config.trainer.total_epochs is not None and not config.data.training_sets:
        raise ValueError(
            "trainer.total_epochs counts the rows of data.train_files or data.train_sets, and an "
            "environment gives its rows only once the run has begun; set trainer.total_steps"
        )
    if not config.data.training_sets and (service is None or service.address is None):
        raise ValueError(
            "data.train_files is empty: name files or data sets with the prompts, there or under "
            "data.train_sets, or an environment that has them under rollout.environment.address"
        )


def _prompts_fit_episodes_and_scorers(config: DerivedSettings) -> None:
    if config.has_episodes and config.data.prompt_format == "text":
        raise ValueError(
            "rollout.tools and rollout.environment make conversations of several turns, and "
            "data.prompt_format=text has none; write chat, or auto with lists of messages"
        )
    if config.has_episodes and config.data.image_key is not None:
        raise ValueError(
            "data.image_key is for single answers: leave it out, or rollout.tools and rollout.environment"
        )
    if not config.reward.has_scorer and config.rollout.environment is None:
        raise ValueError(
            "no scorer: name at least one under reward.functions (such as exact_match), reward.services, "
            "reward.attached, reward.models, reward.judges or reward.code, or an environment under "
            "rollout.environment"
        )
    for name, reward in config.val_rewards.items():
        if not reward.has_scorer and config.rollout.environment is None:
            raise ValueError(
                f"{reward_key(name)} has no scorer: name one, such as functions: [{{name: gsm8k}}], "
                "or leave reward out for that of the run"
            )
    config.model.vision.require_images(config.data.image_key)


def _groups_fit_into_calls(config: DerivedSettings) -> None:
    largest = max([config.rollout.n, config.rollout.val.n, *(s.n for s in config.held_out_sets)])
    for service in (service for reward in config.rewards.values() for service in reward.services):
        if service.group and service.max_items_per_call < largest:
            raise ValueError(
                f"the reward service {service.name!r} gets the samples of a prompt in one call (group: "
                f"true), and max_items_per_call={service.max_items_per_call} is below rollout.n="
                f"{config.rollout.n} or the n of a validation; raise it to {largest}"
            )


def _held_out_samples_differ(config: DerivedSettings) -> None:
    for prompts in config.held_out_sets:
        if prompts.name and prompts.n > 1 and not prompts.temperature:
            where = f"data.val_sets.{prompts.name}"
            raise ValueError(
                f"{where}: {prompts.n} samples per prompt (n) at a temperature of 0 would all be the "
                f"same; set {where}.temperature, for example to 1"
            )


def _episodes_have_limits_of_their_own(config: DerivedSettings) -> None:
    for name, given in config.data.val_sets.items():
        if given.max_response_length is not None and config.has_episodes:
            raise ValueError(
                f"data.val_sets.{name}.max_response_length: the limits of episodes are those of "
                "rollout.episode and data.max_response_length; leave it out"
            )


def _guard_can_act(config: DerivedSettings) -> None:
    for action in (Action.LOWER_KL_COEF, Action.RAISE_KL_COEF):
        if config.guard.uses(action) and not config.needs_reference:
            raise ValueError(
                f"a guard rule may {action.value}, but no KL is in use: set "
                "algorithm.use_kl_in_reward or actor.use_kl_loss"
            )
    if config.guard.uses(Action.FIXED_KL) and not (
        config.algorithm.use_kl_in_reward and config.algorithm.kl_ctrl.type == "adaptive"
    ):
        raise ValueError(
            "a guard rule may take fixed_kl, but no coefficient is adaptive: set "
            "algorithm.use_kl_in_reward and kl_ctrl.type=adaptive"
        )
    scalable = config.actor.policy_loss.scalable_options
    if config.guard.uses(Action.LOWER_CLIP) and not scalable and config.algorithm.path is None:
        raise ValueError(
            f"a guard rule may lower_clip, but actor.policy_loss={config.actor.policy_loss.type} has no "
            "clip range to scale; remove guard.*.lower_clip, use a loss that clips, or name your own "
            "loss's clip options in actor.policy_loss.scalable"
        )


def _learner_can_work_ahead(config: DerivedSettings) -> None:
    barrier, mini = config.barrier, config.actor.ppo_mini_batch_size
    if barrier.work_ahead == "off":
        if barrier.prompts_per_chunk is not None:
            raise ValueError(
                "barrier.prompts_per_chunk needs barrier.work_ahead; set work_ahead, or leave "
                "prompts_per_chunk out"
            )
        return
    if config.placement == "colocated" or config.rollout.sleep == "always":
        raise ValueError(
            f"barrier.work_ahead={barrier.work_ahead}: learner and servers take turns on the same GPUs, "
            "so the learner cannot compute before the batch is complete; leave it out"
        )
    if config.trainer.dataflow is not None:
        raise ValueError(
            f"barrier.work_ahead={barrier.work_ahead}: a dataflow decides only at its train call which "
            "samples it trains on; leave out work_ahead or trainer.dataflow"
        )
    if config.algorithm.dynamic_sampling.enable:
        raise ValueError(
            f"barrier.work_ahead={barrier.work_ahead}: with algorithm.dynamic_sampling the place of a "
            "sample in the batch is known only when all samples are there; leave one of them out"
        )
    for size in (mini, config.critic.ppo_mini_batch_size if "critic" in config.needs else None):
        if size is not None and size % (barrier.prompts_per_chunk or 1):
            raise ValueError(
                f"barrier.prompts_per_chunk={barrier.prompts_per_chunk} must divide a mini-batch of "
                f"{size} prompts"
            )
    if barrier.work_ahead == "gradients" and config.needs_whole_batch:
        raise ValueError(
            f"barrier.work_ahead=gradients: {config.needs_whole_batch}; write scores, or leave it out"
        )
    has_one = mini == config.data.train_batch_size
    if barrier.work_ahead == "scores" and has_one and not config.scores_first_mini_batch:
        raise ValueError(
            "barrier.work_ahead=scores: with a single mini-batch, no reference, no other frozen network "
            "and no critic there is nothing to score; write gradients, or leave it out"
        )


def _weights_can_arrive_in_flight(config: DerivedSettings) -> None:
    rollout = config.rollout
    if not config.pushes_in_flight:
        return
    refused = {
        "barrier.max_staleness of 0: its samples are of one version": not config.barrier.bound,
        "rollout.sampler: engine, which does not record where a version begins": rollout.sampler == "engine",
        "rollout.tools and rollout.environment: only single answers": config.has_episodes,
    }
    _refuse(f"rollout.in_flight={rollout.in_flight}", refused, "; write in_flight: wait")


def _steps_can_be_sampled_ahead(config: DerivedSettings) -> None:
    barrier, algorithm = config.barrier, config.algorithm
    if not barrier.bound:
        return
    takes_turns = config.placement == "colocated" or config.rollout.sleep == "always"
    refused = {
        "turns of learner and servers on the same GPUs (placement, rollout.sleep)": takes_turns,
        "barrier.work_ahead, since batches are complete before the learner is": barrier.work_ahead != "off",
        "trainer.dataflow, whose samples may follow from the step before": bool(config.trainer.dataflow),
        "algorithm.dynamic_sampling, which draws prompts late": algorithm.dynamic_sampling.enable,
        "a function as data.curriculum, which needs the step before": isinstance(config.data.curriculum, str),
        "data.image_key, since images are kept for one step": config.data.image_key is not None,
        "trainer.save_freq=1, since nothing is sampled ahead of a checkpoint": config.trainer.save_freq == 1,
    }
    staleness = f"barrier.max_staleness={barrier.bound} samples later steps while one is trained, which"
    _refuse(staleness, refused, "; leave one of them out")
    if config.rollout_correction.method == "none":
        raise ValueError(
            f"barrier.max_staleness={barrier.bound}: samples come from older weights than those that are "
            "trained, and nothing corrects for that; leave algorithm.rollout_correction.method out, which "
            "means sequence_mask here, or set tis or icepop"
        )


def _choices_can_be_repeated(config: DerivedSettings) -> None:
    if not config.actor.router_replay:
        return
    refused = {
        "rollout.in_flight: recompute, which chooses the experts of earlier tokens again; write keep or "
        "wait": config.rollout.in_flight == "recompute",
        "algorithm.replay.prompts_per_step: files of trajectories, which are its buffer, have no choices of "
        "experts; leave one of them out": config.replays,
    }
    _refuse("actor.router_replay", refused)


def _corrections_can_be_moved(config: DerivedSettings) -> None:
    if config.actor.router_bias_update_rate and config.model.lora is not None:
        raise ValueError(
            "actor.router_bias_update_rate does not go with model.lora, because an export of adapters has no "
            "routers: leave one of them out"
        )


def _groups_can_be_replayed(config: DerivedSettings) -> None:
    trainer, algorithm = config.trainer, config.algorithm
    if not config.replays:
        return
    refused = {
        "barrier.mode: strict, which trains no token of older weights; write barrier: {mode: bounded, "
        "max_staleness: 0}": config.barrier.mode == "strict",
        "algorithm.rollout_correction.method: none, since nothing would correct for older weights; leave it "
        "out, which means sequence_mask here": config.rollout_correction.method == "none",
        "trainer.save_trajectories or save_tokens: false, since the files of trajectories are the "
        "buffer": not (trainer.save_trajectories and trainer.save_tokens),
        "barrier.work_ahead, since batches are complete before the learner is": config.barrier.work_ahead
        != "off",
        "trainer.dataflow, which chooses by itself what it trains": bool(trainer.dataflow),
        "an estimator that needs greedy answers, which are not kept": "greedy" in config.needs,
        "data.image_key, since images are kept for one step": config.data.image_key is not None,
        "rollout.tools and rollout.environment: only single answers": config.has_episodes,
    }
    _refuse(f"algorithm.replay.prompts_per_step={algorithm.replay.prompts_per_step}", refused)


def _servers_can_validate_beside(config: DerivedSettings) -> None:
    if not config.validates_beside:
        return
    takes_turns = config.placement == "colocated" or config.rollout.sleep == "always"
    refused = {
        "turns of learner and servers on the same GPUs (placement, rollout.sleep)": takes_turns,
        "placement: fit, which chooses rollout.replicas": config.placement == "fit",
        "data.image_key, since images are kept for one step": config.data.image_key is not None,
        "a run without held-out prompts (data.val_files, data.val_sets)": not config.held_out_sets,
    }
    servers = f"rollout.validation_servers={config.rollout.validation_servers}"
    _refuse(servers, refused, "; leave one of them out")


def _servers_can_have_other_engines(config: DerivedSettings) -> None:
    if config.rollout.other_engines and config.placement == "fit":
        raise ValueError(
            "rollout.other_engines does not go with placement: fit, which chooses rollout.replicas; leave "
            "one of them out"
        )


def _frozen_networks_have_a_use(config: DerivedSettings) -> None:
    if config.actor.memory.offload_reference and not config.frozen_folders:
        raise ValueError(
            "actor.memory.offload_reference: this run has no reference model of its own (no KL is in "
            "use, or with model.lora the reference is the policy without adapters) and no "
            "algorithm.networks; leave it out"
        )
    if config.algorithm.networks and not (
        config.algorithm.is_own or isinstance(config.actor.policy_loss, CustomLoss)
    ):
        raise ValueError(
            f"algorithm.networks: nothing reads the log-probs of {', '.join(config.algorithm.networks)}, "
            "because estimator and policy loss are built in; name one of your own "
            "(docs/add-an-algorithm.md), or leave networks out"
        )


def _teacher_has_a_use(config: DerivedSettings) -> None:
    """Refuses a teacher without a loss that reads its tokens, such a loss without a teacher, and what neither
    can do."""
    teacher, loss = config.algorithm.teacher, config.actor.policy_loss
    if teacher is None:
        if isinstance(loss, Distill):
            raise ValueError(
                "actor.policy_loss: distill needs a served teacher; write algorithm.teacher: {address: "
                "http://HOST:PORT/v1, model: NAME} (docs/distillation.md)"
            )
        return
    if not (config.algorithm.is_own or isinstance(loss, Distill | CustomLoss)):
        raise ValueError(
            f"algorithm.teacher: the loss {loss.type} reads no teacher's tokens; write actor.policy_loss: "
            "distill, or leave teacher out"
        )
    refused = {
        f"rollout.temperature={config.rollout.temperature:g}, since its log-probs are at temperature 1; "
        "write 1": config.rollout.temperature != 1.0,
        "data.image_key, since it is asked about text alone": config.data.image_key is not None,
        "algorithm.replay.prompts_per_step: files of trajectories, which are its buffer, have no tokens of a "
        "teacher; leave one of them out": config.replays,
    }
    _refuse("algorithm.teacher", refused)


def _divided_matrices_have_whole_averages(config: DerivedSettings) -> None:
    """Refuses optimizers that need whole rows of matrices, of which a rank then has parts."""
    critics = {"critic": config.critic.optim.type} if "critic" in config.needs else {}
    for name, kind in {"actor": config.actor.optim.type, **critics}.items():
        if config.learner.tensor_parallel > 1 and kind != "adamw":
            raise ValueError(
                f"{name}.optim.type={kind} needs whole rows of matrices, which learner.tensor_parallel "
                "divides; set adamw, or leave tensor_parallel out"
            )


def _rows_fit_into_messages(config: DerivedSettings) -> None:
    """Refuses a step whose rows do not fit into the one message that gives them to the learner."""
    num_rows, limit = config.data.train_batch_size * config.rollout.n, config.service.max_message_mib
    size = BYTES_PER_ROW + (0 if config.algorithm.teacher is None else BYTES_PER_TEACHER_DIGEST)
    needed = math.ceil(num_rows * size / 2**20)
    if needed > limit:
        raise ValueError(
            f"a step of {num_rows:,} rows (data.train_batch_size x rollout.n) needs messages of up to "
            f"{needed} MiB: set service.max_message_mib to at least that (now {limit})"
        )


def _batches_fit(config: DerivedSettings) -> None:
    batch, mini = config.data.train_batch_size, config.actor.ppo_mini_batch_size
    # A dataflow decides how many prompts a batch has.
    if batch % mini and config.trainer.dataflow is None:
        raise ValueError(
            f"actor.ppo_mini_batch_size={mini} must divide data.train_batch_size={batch}, as "
            f"{math.gcd(batch, mini)} does"
        )
    critic = config.critic.ppo_mini_batch_size
    if critic is not None and batch % critic and config.trainer.dataflow is None:
        raise ValueError(f"critic.ppo_mini_batch_size={critic} must divide data.train_batch_size={batch}")
    # The number of ranks may come from the machine's GPUs, or from the hosts.
    is_known = config.learner.context_parallel != "auto" or "world_size" in config.learner.model_fields_set
    if is_known and config.budget_refusal:
        raise ValueError(config.budget_refusal)
    check_warmup(config)
    if config.rollout.n < 2 and (why := _compares_samples(config)):
        raise ValueError(f"{why}: rollout.n must be at least 2")
    overlong = config.algorithm.overlong
    if overlong.enable and overlong.buffer_length > config.data.max_response_length:
        raise ValueError(
            f"algorithm.overlong.buffer_length={overlong.buffer_length} must not exceed "
            f"data.max_response_length={config.data.max_response_length}: even the shortest response "
            "would be penalised; lower it"
        )
    if config.service.dead_after_s <= config.service.suspect_after_s:
        raise ValueError("service.dead_after_s must exceed service.suspect_after_s")


def _compares_samples(config: DerivedSettings) -> str:
    """Says which option needs more than one sample per prompt, and why; "" if none does."""
    algorithm = config.algorithm
    if "group" in config.needs:
        return f"algorithm.adv_estimator={algorithm.name} compares the samples of a group"
    if algorithm.dynamic_sampling.enable:
        return "algorithm.dynamic_sampling.enable compares the scores of a group"
    if algorithm.resample.method == "max_min":
        return "algorithm.resample.method=max_min draws from a group's best and worst"
    return ""


def check_warmup(config: DerivedSettings) -> None:
    """Refuses a critic that warms up for the whole run.

    Raises:
        ConfigError: no step is left to the policy.
    """
    steps = config.trainer.total_steps
    if steps is not None and "critic" in config.needs and config.critic.warmup >= max(1, steps):
        raise ConfigError(
            f"critic.warmup={config.critic.warmup} leaves none of trainer.total_steps="
            f"{steps} to the policy; lower it, or raise total_steps"
        )


def _refuse(setting: str, refused: Mapping[str, bool], remedy: str = "") -> None:
    """Refuses a setting for the first reason that holds, if any does."""
    for reason, holds in refused.items():
        if holds:
            raise ValueError(f"{setting} does not go with {reason}{remedy}")


AGREEMENTS: Final[tuple[Callable[[DerivedSettings], None], ...]] = (
    _kl_can_be_steered,
    _there_are_rows,
    _prompts_fit_episodes_and_scorers,
    _groups_fit_into_calls,
    _held_out_samples_differ,
    _episodes_have_limits_of_their_own,
    _guard_can_act,
    _learner_can_work_ahead,
    _weights_can_arrive_in_flight,
    _steps_can_be_sampled_ahead,
    _choices_can_be_repeated,
    _corrections_can_be_moved,
    _groups_can_be_replayed,
    _servers_can_validate_beside,
    _servers_can_have_other_engines,
    _frozen_networks_have_a_use,
    _teacher_has_a_use,
    _divided_matrices_have_whole_averages,
    _rows_fit_into_messages,
    _batches_fit,
)
"""All checks, in the order in which a configuration is checked."""
