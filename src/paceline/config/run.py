"""The whole configuration of a run."""

from __future__ import annotations

import math
from typing import Final, Literal

from pydantic import Field, model_validator

from paceline.config.base import Section
from paceline.config.data import DataConfig
from paceline.config.guard import GuardConfig
from paceline.config.model import ModelConfig
from paceline.config.reward import RewardConfig
from paceline.config.rollout import RolloutConfig
from paceline.config.services import (
    BarrierConfig,
    BrokerConfig,
    LearnerConfig,
    ServiceConfig,
    TelemetryConfig,
    TrainerConfig,
    WeightsConfig,
)
from paceline.config.training.actor import ActorConfig, CriticConfig
from paceline.config.training.algorithm import REFERENCE, AlgorithmConfig
from paceline.config.training.policy_losses import CovarianceLoss, CustomLoss
from paceline.config.validation import HeldOutSet, ValSamplingConfig, reward_key
from paceline.core.errors import ConfigError
from paceline.core.estimators import Need
from paceline.core.guard import Action
from paceline.core.samples.replay import ReplayRule

_SAMPLING = set(ValSamplingConfig.model_fields)

BYTES_PER_ROW: Final = 256
"""Most bytes per row in the learner's message: ids, a blob's key and digest, lengths and a score."""


class RunConfig(Section):
    """Everything that `paceline train` needs; every service reads its part of the resolved configuration."""

    placement: Literal["auto", "fit", "given", "colocated"] = Field(
        "auto",
        description="How `paceline train` uses the GPUs of this machine where learner.devices and "
        "rollout.devices are not set. auto: colocated if learner.world_size and rollout.replicas are left "
        "out and the memory plan has room; otherwise fit, but without lowering counts. fit: chooses "
        "learner.world_size, rollout.replicas and rollout.tensor_model_parallel_size, if they are left out, "
        "so that all visible GPUs are used, about half of them by learner ranks; counts for which there are "
        "too few GPUs are lowered. With one GPU, learner and engine share it. given: uses the counts as "
        "configured. colocated: learner ranks and rollout servers take turns on the same GPUs, which are all "
        "visible GPUs unless learner.devices and rollout.devices are set.",
    )
    data: DataConfig
    model: ModelConfig
    actor: ActorConfig = ActorConfig()
    critic: CriticConfig = CriticConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    trainer: TrainerConfig
    learner: LearnerConfig = LearnerConfig()
    barrier: BarrierConfig = BarrierConfig()
    guard: GuardConfig = GuardConfig()
    broker: BrokerConfig = BrokerConfig()
    weights: WeightsConfig = WeightsConfig()
    service: ServiceConfig = ServiceConfig()
    telemetry: TelemetryConfig = TelemetryConfig()

    @property
    def has_episodes(self) -> bool:
        """Whether samples are episodes of turns, not single answers."""
        return bool(self.rollout.tools) or self.rollout.environment is not None

    def with_epochs_counted(self, num_prompts: int) -> RunConfig:
        """Returns a copy with trainer.total_steps computed from trainer.total_epochs, if that is set.

        Args:
            num_prompts: usable training prompts, of all sets.

        Raises:
            ConfigError: the run would be too short.
        """
        trainer = self.trainer
        if trainer.total_epochs is None:
            return self
        steps = math.ceil(trainer.total_epochs * (num_prompts // self.data.train_batch_size))
        if trainer.total_steps is not None:
            steps = min(steps, trainer.total_steps)
        counted = self.model_copy(update={"trainer": trainer.model_copy(update={"total_steps": steps})})
        counted._check_warmup()
        return counted

    def _check_warmup(self) -> None:
        steps = self.trainer.total_steps
        if steps is not None and "critic" in self.needs and self.critic.warmup >= max(1, steps):
            raise ConfigError(
                f"critic.warmup={self.critic.warmup} leaves none of trainer.total_steps="
                f"{steps} to the policy; lower it, or raise total_steps"
            )

    @property
    def prompt_seed(self) -> int:
        """The seed of the prompts' order."""
        return self.trainer.seed if self.data.seed is None else self.data.seed

    @property
    def held_out_sets(self) -> tuple[HeldOutSet, ...]:
        """The sets of held-out prompts, first that of data.val_files; empty if there is no validation."""
        data, general = self.data, self.rollout.val
        unnamed = HeldOutSet(
            name="",
            files=data.val_files,
            max_prompts=data.val_max_prompts,
            every=1,
            max_tokens=data.max_response_length,
            **general.model_dump(),
        )
        named = [
            HeldOutSet(
                name=name,
                files=given.files,
                max_prompts=given.max_prompts,
                every=given.every,
                max_tokens=given.max_response_length or data.max_response_length,
                **general.model_dump() | given.model_dump(include=_SAMPLING, exclude_none=True),
            )
            for name, given in data.val_sets.items()
        ]
        return (*([unnamed] if data.val_files else []), *named)

    @property
    def val_rewards(self) -> dict[str, RewardConfig]:
        """The rewards of the sets of data.val_sets that have one of their own, by set."""
        named = self.data.val_sets.items()
        return {name: self.reward.with_scorers(of.reward) for name, of in named if of.reward is not None}

    @property
    def rewards(self) -> dict[str, RewardConfig]:
        """The run's reward, by "", and those of sets that have one of their own, by set."""
        return {"": self.reward, **self.val_rewards}

    @property
    def scores_groups(self) -> bool:
        """Whether anything scores the samples of a prompt together."""
        return any(reward.has_groups for reward in self.rewards.values())

    def validated_after(self, step: int) -> tuple[HeldOutSet, ...]:
        """Returns the sets that are answered after a step; 0 is the start."""
        return tuple(s for s in self.held_out_sets if self.trainer.validates_after(step, every=s.every))

    @property
    def keeps_texts(self) -> bool:
        """Whether responses' texts stay until their step is finished: files and dataflows read them."""
        return self.trainer.save_trajectories or self.trainer.dataflow is not None

    @property
    def own_code(self) -> dict[str, str]:
        """The user's own functions and classes (`path/to/file.py:NAME` or `module:NAME`), by configuration
        key."""
        loss, own = self.actor.policy_loss, {"trainer.dataflow": self.trainer.dataflow}
        own |= {
            "algorithm.path": self.algorithm.path,
            "algorithm.adv_estimator": self.algorithm.adv_estimator,
        }
        own |= {"actor.policy_loss": loss.path if isinstance(loss, CustomLoss) else None}
        curriculum = self.data.curriculum
        own |= {"data.curriculum": curriculum if isinstance(curriculum, str) else None}
        for name, reward in self.rewards.items():
            key = reward_key(name)
            own |= {f"{key}.functions[{place}]": f.name for place, f in enumerate(reward.functions)}
        own |= {f"rollout.tools[{place}]": tool for place, tool in enumerate(self.rollout.tools)}
        return {key: reference for key, reference in own.items() if reference and ":" in reference}

    def with_compile(self, *, on_gpu: bool) -> RunConfig:
        """Returns a copy with `actor.compile` chosen, if it is auto."""
        if self.actor.compile != "auto":
            return self
        chosen = self.actor.model_copy(update={"compile": on_gpu and self.learner.num_context_ranks == 1})
        return self.model_copy(update={"actor": chosen})

    @property
    def context_sizes(self) -> list[int]:
        """The values of `learner.context_parallel` with which a row fits into the token budget, in ascending
        order.

        If the file sets no budget, it can be raised to a rank's share of the longest row.
        """
        learner, is_given = self.learner, "ppo_max_token_len_per_gpu" in self.actor.model_fields_set
        if learner.context_parallel != "auto":
            sizes = [learner.context_parallel]
        else:
            most = 1 if self.actor.compile is True else learner.world_size
            sizes = [size for size in range(1, most + 1) if learner.world_size % size == 0]
        budget = self.actor.ppo_max_token_len_per_gpu if is_given else self.max_model_len
        return [size for size in sizes if size * budget >= self.max_model_len]

    def with_context(self) -> RunConfig:
        """Returns a copy with `learner.context_parallel` and a token budget chosen, if they are open.

        Raises:
            ConfigError: the budget of all ranks together holds no row.
        """
        if self.budget_refusal:
            raise ConfigError(self.budget_refusal)
        learner, actor, size = self.learner, self.actor, self.context_sizes[0]
        budget = max(actor.ppo_max_token_len_per_gpu, -(-self.max_model_len // size))
        if learner.context_parallel == "auto":
            learner = learner.model_copy(update={"context_parallel": size})
        if budget != actor.ppo_max_token_len_per_gpu:
            actor = actor.model_copy(update={"ppo_max_token_len_per_gpu": budget})
        return self.model_copy(update={"learner": learner, "actor": actor})

    @property
    def budget_refusal(self) -> str:
        """Why the ranks' token budgets together cannot hold a row, and what to change; "" if they can."""
        if self.context_sizes:
            return ""
        return (
            f"actor.ppo_max_token_len_per_gpu={self.actor.ppo_max_token_len_per_gpu} cannot hold one "
            "sequence of data.max_prompt_length + data.max_response_length = "
            f"{self.max_model_len} tokens; raise it, or learner.context_parallel"
        )

    @property
    def micro_batch_tokens(self) -> int:
        """Most tokens of a micro-batch, which the ranks of `learner.context_parallel` share."""
        return self.actor.ppo_max_token_len_per_gpu * self.learner.num_context_ranks

    @property
    def needs(self) -> frozenset[Need]:
        """What the algorithm needs: a critic, greedy answers or groups of samples."""
        return frozenset(self.algorithm.estimator.needs)

    @property
    def needs_reference(self) -> bool:
        """Whether a KL to the starting model enters reward or loss."""
        return self.algorithm.use_kl_in_reward or self.actor.use_kl_loss

    @property
    def frozen_networks(self) -> tuple[str, ...]:
        """The networks that score the samples and are never updated, by name, the reference first."""
        return (*((REFERENCE,) if self.needs_reference else ()), *self.algorithm.networks)

    @property
    def frozen_folders(self) -> dict[str, str]:
        """The folders of the frozen networks that have weights of their own; with model.lora the reference
        has none."""
        own = {name: network.path for name, network in self.algorithm.networks.items()}
        return {REFERENCE: self.model.path, **own} if self.needs_reference and not self.model.lora else own

    @property
    def needs_all_old_log_probs(self) -> bool:
        """Whether anything reads the old log-probs of every row before the first update."""
        algorithm = self.algorithm
        return (
            algorithm.use_kl_in_reward
            or (self.needs_reference and self.guard.refuses_by_reference_kl)
            or algorithm.rollout_correction.method != "none"
            or algorithm.resample.method != "none"
            or isinstance(self.actor.policy_loss, CovarianceLoss)
            or algorithm.is_own
        )

    @property
    def prompts_per_chunk(self) -> int:
        """Number of prompts that the learner plans and computes ahead together; divides every mini-batch
        size."""
        sizes = [self.actor.ppo_mini_batch_size]
        if "critic" in self.needs and self.critic.ppo_mini_batch_size is not None:
            sizes.append(self.critic.ppo_mini_batch_size)
        most, given = math.gcd(*sizes), self.barrier.prompts_per_chunk
        if self.barrier.work_ahead == "off":
            return most
        if given is not None:
            return given
        tokens = self.rollout.n * (self.data.max_prompt_length + self.data.max_response_length / 2)
        filled = self.micro_batch_tokens * self.learner.num_data_ranks / tokens
        return next((size for size in range(1, most) if most % size == 0 and size >= filled), most)

    @property
    def _compares_samples(self) -> str:
        """Which option needs more than one sample per prompt, and why; "" if none does."""
        algorithm = self.algorithm
        if "group" in self.needs:
            return f"algorithm.adv_estimator={algorithm.name} compares the samples of a group"
        if algorithm.dynamic_sampling.enable:
            return "algorithm.dynamic_sampling.enable compares the scores of a group"
        if algorithm.resample.method == "max_min":
            return "algorithm.resample.method=max_min draws from a group's best and worst"
        return ""

    @property
    def scores_first_mini_batch(self) -> bool:
        """Whether the first mini-batch's rows are scored before the update in every step."""
        return bool(self.frozen_networks) or "critic" in self.needs or self.needs_all_old_log_probs

    @property
    def needs_whole_batch(self) -> str:
        """Why gradients cannot be computed before the batch is complete; "" if they can."""
        if not self.algorithm.estimator.of_group:
            return f"algorithm.adv_estimator={self.algorithm.name} looks at all samples of the batch"
        if self.needs_all_old_log_probs:
            return (
                "a KL in the reward, a guard rule that refuses by it, algorithm.rollout_correction, "
                "algorithm.resample and covariance losses read the log-probs of all samples before the update"
            )
        if self.actor.positive_loss_coef or self.actor.load_balance_coef:
            return "actor.positive_loss_coef and actor.load_balance_coef have counts of their own"
        return ""

    @property
    def request_timeout_s(self) -> float:
        """Longest time for a prompt group in the engine."""
        if self.rollout.request_timeout_s is not None:
            return self.rollout.request_timeout_s
        return max(600.0, 0.2 * self.longest_response)

    @property
    def stall_timeout_s(self) -> float:
        """Longest time without a new trajectory."""
        stall = self.barrier.stall_timeout_s
        return 1.5 * self.request_timeout_s if stall is None else stall

    @property
    def collect_timeout_s(self) -> float:
        """Longest duration of a step's collection."""
        collect = self.barrier.collect_timeout_s
        return 3.0 * self.request_timeout_s if collect is None else collect

    @property
    def max_model_len(self) -> int:
        """Longest sequence that is trained on, prompt and response together, in tokens."""
        return self.data.max_prompt_length + self.data.max_response_length

    @property
    def longest_response(self) -> int:
        """Most tokens of a response, held-out prompts' included."""
        return max([self.data.max_response_length, *(s.max_tokens for s in self.held_out_sets)])

    @property
    def engine_model_len(self) -> int:
        """Longest sequence of an engine, in tokens."""
        return self.data.max_prompt_length + self.longest_response

    @model_validator(mode="after")
    def _steerable_kl(self) -> RunConfig:
        control, algorithm = self.algorithm.kl_ctrl, self.algorithm
        sequences = self.data.train_batch_size * self.rollout.n
        if algorithm.use_kl_in_reward and control.type == "adaptive" and 5 * control.horizon <= sequences:
            raise ValueError(
                f"algorithm.kl_ctrl.horizon={control.horizon} would let one step of {sequences} sequences "
                "(data.train_batch_size x rollout.n) lower the coefficient to 0 or below; raise it above "
                f"{sequences // 5}, or to {10 * sequences} for a fiftieth per step"
            )
        return self

    @model_validator(mode="after")
    def _has_rows(self) -> RunConfig:
        service = self.rollout.environment
        if self.trainer.total_epochs is not None and not self.data.training_sets:
            raise ValueError(
                "trainer.total_epochs counts the rows of data.train_files or data.train_sets, and an "
                "environment tells its rows only once the run has begun; set trainer.total_steps"
            )
        if not self.data.training_sets and (service is None or service.address is None):
            raise ValueError(
                "data.train_files is empty: name files or data sets with the prompts, there or under "
                "data.train_sets, or an environment that has them under rollout.environment.address"
            )
        return self

    @model_validator(mode="after")
    def _chat_episodes(self) -> RunConfig:
        if self.has_episodes and self.data.prompt_format == "text":
            raise ValueError(
                "rollout.tools and rollout.environment make conversations of several turns, and "
                "data.prompt_format=text has none; write chat, or auto with lists of messages"
            )
        if self.has_episodes and self.data.image_key is not None:
            raise ValueError(
                "data.image_key is for single answers: leave it out, or rollout.tools and rollout.environment"
            )
        if not self.reward.has_scorer and self.rollout.environment is None:
            raise ValueError(
                "no scorer: name at least one under reward.functions (say exact_match), reward.services, "
                "reward.attached, reward.models, reward.judges or reward.code, or an environment under "
                "rollout.environment"
            )
        for name, reward in self.val_rewards.items():
            if not reward.has_scorer and self.rollout.environment is None:
                raise ValueError(
                    f"{reward_key(name)} has no scorer: name one, say functions: [{{name: gsm8k}}], "
                    "or leave reward out for that of the run"
                )
        return self

    @model_validator(mode="after")
    def _groups_fit_into_calls(self) -> RunConfig:
        largest = max([self.rollout.n, self.rollout.val.n, *(s.n for s in self.held_out_sets)])
        for service in (service for reward in self.rewards.values() for service in reward.services):
            if service.group and service.max_items_per_call < largest:
                raise ValueError(
                    f"the reward service {service.name!r} gets the samples of a prompt in one call (group: "
                    f"true), and max_items_per_call={service.max_items_per_call} is below rollout.n="
                    f"{self.rollout.n} or the n of a validation; raise it to {largest}"
                )
        return self

    @model_validator(mode="after")
    def _answers_differ(self) -> RunConfig:
        for prompts in self.held_out_sets:
            if prompts.name and prompts.n > 1 and not prompts.temperature:
                where = f"data.val_sets.{prompts.name}"
                raise ValueError(
                    f"{where}: {prompts.n} samples per prompt (n) at a temperature of 0 would all be the "
                    f"same; set {where}.temperature, say to 1"
                )
        return self

    @model_validator(mode="after")
    def _episodes_have_limits_of_their_own(self) -> RunConfig:
        for name, given in self.data.val_sets.items():
            if given.max_response_length is not None and self.has_episodes:
                raise ValueError(
                    f"data.val_sets.{name}.max_response_length: the limits of episodes are those of "
                    "rollout.episode and data.max_response_length; leave it out"
                )
        return self

    @model_validator(mode="after")
    def _guard_can_act(self) -> RunConfig:
        for action in (Action.LOWER_KL_COEF, Action.RAISE_KL_COEF):
            if self.guard.uses(action) and not self.needs_reference:
                raise ValueError(
                    f"a guard rule may {action.value}, but no KL is in use: set "
                    "algorithm.use_kl_in_reward or actor.use_kl_loss"
                )
        if self.guard.uses(Action.FIXED_KL) and not (
            self.algorithm.use_kl_in_reward and self.algorithm.kl_ctrl.type == "adaptive"
        ):
            raise ValueError(
                "a guard rule may take fixed_kl, but no coefficient is adaptive: set "
                "algorithm.use_kl_in_reward and kl_ctrl.type=adaptive"
            )
        scalable = self.actor.policy_loss.scalable_options
        if self.guard.uses(Action.LOWER_CLIP) and not scalable and self.algorithm.path is None:
            raise ValueError(
                f"a guard rule may lower_clip, but actor.policy_loss={self.actor.policy_loss.type} has no "
                "clip range to scale; remove guard.*.lower_clip, use a loss that clips, or name your own "
                "loss's clip options in actor.policy_loss.scalable"
            )
        return self

    @model_validator(mode="after")
    def _can_work_ahead(self) -> RunConfig:
        barrier, mini = self.barrier, self.actor.ppo_mini_batch_size
        if barrier.work_ahead == "off":
            if barrier.prompts_per_chunk is not None:
                raise ValueError(
                    "barrier.prompts_per_chunk is for barrier.work_ahead; set that, or leave it out"
                )
            return self
        if self.placement == "colocated" or self.rollout.sleep == "always":
            raise ValueError(
                f"barrier.work_ahead={barrier.work_ahead}: learner and servers take turns on the same GPUs, "
                "so the learner cannot compute before the batch is complete; leave it out"
            )
        if self.trainer.dataflow is not None:
            raise ValueError(
                f"barrier.work_ahead={barrier.work_ahead}: a dataflow decides only at its train call which "
                "samples it trains on; leave out work_ahead or trainer.dataflow"
            )
        if self.algorithm.dynamic_sampling.enable:
            raise ValueError(
                f"barrier.work_ahead={barrier.work_ahead}: with algorithm.dynamic_sampling the place of a "
                "sample in the batch is known only when all samples are there; leave one of them out"
            )
        for size in (mini, self.critic.ppo_mini_batch_size if "critic" in self.needs else None):
            if size is not None and size % (barrier.prompts_per_chunk or 1):
                raise ValueError(
                    f"barrier.prompts_per_chunk={barrier.prompts_per_chunk} must divide a mini-batch of "
                    f"{size} prompts"
                )
        if barrier.work_ahead == "gradients" and self.needs_whole_batch:
            raise ValueError(
                f"barrier.work_ahead=gradients: {self.needs_whole_batch}; write scores, or leave it out"
            )
        has_one = mini == self.data.train_batch_size
        if barrier.work_ahead == "scores" and has_one and not self.scores_first_mini_batch:
            raise ValueError(
                "barrier.work_ahead=scores: with a single mini-batch, no reference, no other frozen network "
                "and no critic there is nothing to score; write gradients, or leave it out"
            )
        return self

    @property
    def pushes_in_flight(self) -> bool:
        """Whether weights reach servers with samples under way, so that several versions sample one."""
        return self.rollout.in_flight != "wait"

    @model_validator(mode="after")
    def _can_push_in_flight(self) -> RunConfig:
        rollout = self.rollout
        if not self.pushes_in_flight:
            return self
        refused = {
            "barrier.max_staleness of 0: its samples are of one version": not self.barrier.bound,
            "rollout.sampler: engine, which does not record where a version begins": rollout.sampler
            == "engine",
            "rollout.tools and rollout.environment: only single answers": self.has_episodes,
        }
        reason = next((reason for reason, is_so in refused.items() if is_so), None)
        if reason is not None:
            raise ValueError(
                f"rollout.in_flight={rollout.in_flight} does not go with {reason}; write in_flight: wait"
            )
        return self

    @model_validator(mode="after")
    def _can_sample_ahead(self) -> RunConfig:
        barrier, algorithm = self.barrier, self.algorithm
        if not barrier.bound:
            return self
        takes_turns = self.placement == "colocated" or self.rollout.sleep == "always"
        refused = {
            "turns of learner and servers on the same GPUs (placement, rollout.sleep)": takes_turns,
            "barrier.work_ahead, since batches are complete before the learner is": barrier.work_ahead
            != "off",
            "trainer.dataflow, whose samples may follow from the step before": bool(self.trainer.dataflow),
            "algorithm.dynamic_sampling, which draws prompts late": algorithm.dynamic_sampling.enable,
            "a function as data.curriculum, which needs the step before": isinstance(
                self.data.curriculum, str
            ),
            "data.image_key, since images are kept for one step": self.data.image_key is not None,
            "trainer.save_freq=1, since nothing is sampled ahead of a checkpoint": self.trainer.save_freq
            == 1,
        }
        reason = next((reason for reason, is_so in refused.items() if is_so), None)
        if reason is not None:
            raise ValueError(
                f"barrier.max_staleness={barrier.bound} samples later steps while one is trained, which does "
                f"not go with {reason}; leave one of them out"
            )
        if algorithm.rollout_correction.method == "none":
            raise ValueError(
                f"barrier.max_staleness={barrier.bound}: samples come from older weights than those that are "
                "trained, and nothing corrects for that; set algorithm.rollout_correction.method to tis, "
                "icepop or sequence_mask"
            )
        return self

    @property
    def replays(self) -> bool:
        """Whether steps train prompt groups of earlier ones again."""
        return self.algorithm.replay.prompts_per_step > 0

    @model_validator(mode="after")
    def _can_replay(self) -> RunConfig:
        trainer, algorithm = self.trainer, self.algorithm
        if not self.replays:
            return self
        refused = {
            "barrier.mode: strict, which trains no token of older weights; write barrier: {mode: bounded, "
            "max_staleness: 0}": self.barrier.mode == "strict",
            "algorithm.rollout_correction.method: none, since nothing would correct for older weights; set "
            "tis, icepop or sequence_mask": algorithm.rollout_correction.method == "none",
            "trainer.save_trajectories or save_tokens: false, since the files of trajectories are the "
            "buffer": not (trainer.save_trajectories and trainer.save_tokens),
            "barrier.work_ahead, since batches are complete before the learner is": self.barrier.work_ahead
            != "off",
            "trainer.dataflow, which chooses by itself what it trains": bool(trainer.dataflow),
            "an estimator that needs greedy answers, which are not kept": "greedy" in self.needs,
            "data.image_key, since images are kept for one step": self.data.image_key is not None,
            "rollout.tools and rollout.environment: only single answers": self.has_episodes,
        }
        reason = next((reason for reason, is_so in refused.items() if is_so), None)
        if reason is not None:
            raise ValueError(
                f"algorithm.replay.prompts_per_step={algorithm.replay.prompts_per_step} does not go with "
                f"{reason}"
            )
        return self

    @property
    def replay_rule(self) -> ReplayRule | None:
        """What determines the groups that a step trains again; None without a replay."""
        if not self.replays:
            return None
        return ReplayRule.from_plain({**self.algorithm.replay.model_dump(), "seed": self.trainer.seed})

    @model_validator(mode="after")
    def _frozen_networks_have_a_use(self) -> RunConfig:
        if self.actor.memory.offload_reference and not self.frozen_folders:
            raise ValueError(
                "actor.memory.offload_reference: this run has no reference model of its own (no KL is in "
                "use, or with model.lora the reference is the policy without adapters) and no "
                "algorithm.networks; leave it out"
            )
        if self.algorithm.networks and not (
            self.algorithm.is_own or isinstance(self.actor.policy_loss, CustomLoss)
        ):
            raise ValueError(
                f"algorithm.networks: nothing reads the log-probs of {', '.join(self.algorithm.networks)}, "
                "as estimator and policy loss are built in; name one of your own "
                "(docs/add-an-algorithm.md), or leave networks out"
            )
        return self

    @model_validator(mode="after")
    def _has_a_compiled_form(self) -> RunConfig:
        if self.learner.num_context_ranks > 1 and self.actor.compiles:
            raise ValueError(
                "learner.context_parallel has no compiled form; set actor.compile: false or leave it out"
            )
        return self

    @model_validator(mode="after")
    def _fits_into_messages(self) -> RunConfig:
        """Refuses a step whose rows do not fit into the one message that tells the learner of them."""
        num_rows, limit = self.data.train_batch_size * self.rollout.n, self.service.max_message_mib
        needed = math.ceil(num_rows * BYTES_PER_ROW / 2**20)
        if needed > limit:
            raise ValueError(
                f"a step of {num_rows:,} rows (data.train_batch_size x rollout.n) needs messages of up to "
                f"{needed} MiB: set service.max_message_mib to at least that (now {limit})"
            )
        return self

    @model_validator(mode="after")
    def _consistent(self) -> RunConfig:
        batch, mini = self.data.train_batch_size, self.actor.ppo_mini_batch_size
        # A dataflow decides how many prompts a batch has.
        if batch % mini and self.trainer.dataflow is None:
            raise ValueError(
                f"actor.ppo_mini_batch_size={mini} must divide data.train_batch_size={batch}, as "
                f"{math.gcd(batch, mini)} does"
            )
        critic = self.critic.ppo_mini_batch_size
        if critic is not None and batch % critic and self.trainer.dataflow is None:
            raise ValueError(f"critic.ppo_mini_batch_size={critic} must divide data.train_batch_size={batch}")
        # The number of ranks may come from the machine's GPUs, or from the hosts.
        is_known = self.learner.context_parallel != "auto" or "world_size" in self.learner.model_fields_set
        if is_known and self.budget_refusal:
            raise ValueError(self.budget_refusal)
        self._check_warmup()
        if self.rollout.n < 2 and (why := self._compares_samples):
            raise ValueError(f"{why}: rollout.n must be at least 2")
        overlong = self.algorithm.overlong
        if overlong.enable and overlong.buffer_length > self.data.max_response_length:
            raise ValueError(
                f"algorithm.overlong.buffer_length={overlong.buffer_length} must not exceed "
                f"data.max_response_length={self.data.max_response_length}: even the shortest response "
                "would be penalised; lower it"
            )
        if self.service.dead_after_s <= self.service.suspect_after_s:
            raise ValueError("service.dead_after_s must exceed service.suspect_after_s")
        return self
