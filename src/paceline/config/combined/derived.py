"""Derives from a run's configuration: sizes, time limits, and the needs of its algorithm."""

from __future__ import annotations

import math
from typing import Self

from paceline.config.combined.sections import RunSections
from paceline.config.reward import RewardConfig
from paceline.config.training.algorithm import REFERENCE
from paceline.config.training.policy_losses import CovarianceLoss, CustomLoss
from paceline.config.training.shaping import RolloutCorrectionConfig
from paceline.config.validation import HeldOutSet, ValSamplingConfig, reward_key
from paceline.core.estimators import Need
from paceline.core.samples.replay import ReplayRule

LONG_ROW = 8192
"""Tokens of a row above which the run's own server gets a blob store beside it, by default."""

_SAMPLING = set(ValSamplingConfig.model_fields)


class DerivedSettings(RunSections):
    """Computes what several sections determine together."""

    @property
    def has_episodes(self) -> bool:
        """Whether samples are episodes of turns, not single answers."""
        return bool(self.rollout.tools) or self.rollout.environment is not None

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
        """The rewards of the sets of data.val_sets that have their own, by set."""
        named = self.data.val_sets.items()
        return {name: self.reward.with_scorers(of.reward) for name, of in named if of.reward is not None}

    @property
    def rewards(self) -> dict[str, RewardConfig]:
        """The run's reward, by "", and those of sets that have their own, by set."""
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

    @property
    def context_sizes(self) -> list[int]:
        """The values of `learner.context_parallel` with which a row fits into the token budget, in ascending
        order.

        If the file sets no budget, it can be raised to a rank's share of the longest row.
        """
        learner, is_given = self.learner, "ppo_max_token_len_per_gpu" in self.actor.model_fields_set
        if learner.context_parallel != "auto" or learner.tensor_parallel > 1:
            sizes = [learner.num_context_ranks]
        else:
            sizes = [size for size in range(1, learner.world_size + 1) if learner.world_size % size == 0]
        budget = self.actor.ppo_max_token_len_per_gpu if is_given else self.max_model_len
        return [size for size in sizes if size * budget >= self.max_model_len]

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
        """The folders of the frozen networks that have separate weights; with model.lora the reference
        has none."""
        own = {name: network.path for name, network in self.algorithm.networks.items()}
        return {REFERENCE: self.model.path, **own} if self.needs_reference and not self.model.lora else own

    @property
    def rollout_correction(self) -> RolloutCorrectionConfig:
        """The correction of the loss, with the method that is used if the file names none."""
        given = self.algorithm.rollout_correction
        if given.method is not None:
            return given
        older = self.barrier.bound > 0 or self.replays
        return given.model_copy(update={"method": "sequence_mask" if older else "none"})

    @property
    def needs_all_old_log_probs(self) -> bool:
        """Whether anything reads the old log-probs of every row before the first update."""
        algorithm = self.algorithm
        return (
            algorithm.use_kl_in_reward
            or (self.needs_reference and self.guard.refuses_by_reference_kl)
            or self.rollout_correction.method != "none"
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
        actor = self.actor
        if actor.positive_loss_coef or actor.load_balance_coef or actor.router_bias_update_rate:
            return (
                "actor.positive_loss_coef, actor.load_balance_coef and actor.router_bias_update_rate have "
                "counts of their own"
            )
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
    def num_own_stores(self) -> int:
        """How many blob stores are started beside the run's own Redis server."""
        stores = self.broker.blob_stores
        if stores == "auto":
            return int(self.broker.url is None and self.max_model_len > LONG_ROW)
        return stores if isinstance(stores, int) else 0

    @property
    def longest_response(self) -> int:
        """Most tokens of a response, including responses to held-out prompts."""
        return max([self.data.max_response_length, *(s.max_tokens for s in self.held_out_sets)])

    @property
    def engine_model_len(self) -> int:
        """Longest sequence of an engine, in tokens."""
        return self.data.max_prompt_length + self.longest_response

    @property
    def pushes_in_flight(self) -> bool:
        """Whether weights reach servers during sampling, so that several versions may sample a response."""
        return self.rollout.in_flight != "wait"

    @property
    def by_engine(self) -> tuple[Self, ...]:
        """The configuration as the servers of each engine use it, that of rollout.name first."""
        return tuple(self.with_engine(name) for name in self.rollout.engine_names)

    def with_engine(self, name: str) -> Self:
        """Returns a copy for the servers of one engine (`RolloutConfig.with_engine`)."""
        return self.model_copy(update={"rollout": self.rollout.with_engine(name)})

    @property
    def validates_beside(self) -> bool:
        """Whether separate servers answer held-out prompts while training goes on."""
        return self.rollout.validation_servers > 0

    @property
    def replays(self) -> bool:
        """Whether steps train prompt groups of earlier ones again."""
        return self.algorithm.replay.prompts_per_step > 0

    @property
    def replay_rule(self) -> ReplayRule | None:
        """What determines the groups that a step trains again; None without a replay."""
        if not self.replays:
            return None
        return ReplayRule.from_plain({**self.algorithm.replay.model_dump(), "seed": self.trainer.seed})
