"""The whole configuration of a run."""

from __future__ import annotations

import math

from pydantic import model_validator

from paceline.config.combined.agreements import AGREEMENTS, check_warmup
from paceline.config.combined.derived import DerivedSettings
from paceline.core.errors import ConfigError


class RunConfig(DerivedSettings):
    """Everything that `paceline train` needs; every service reads its part of the resolved configuration."""

    @model_validator(mode="after")
    def _sections_agree(self) -> RunConfig:
        for check in AGREEMENTS:
            check(self)
        return self

    def with_epochs_counted(self, num_prompts: int) -> RunConfig:
        """Returns a copy with trainer.total_steps computed from trainer.total_epochs, if that is set.

        Raises:
            ConfigError: the run would be too short.
        """
        trainer = self.trainer
        if trainer.total_epochs is None:
            return self
        steps = math.ceil(trainer.total_epochs * (num_prompts // self.data.train_batch_size))
        if trainer.total_steps is not None:
            steps = min(steps, trainer.total_steps)
        counted = self.changed(trainer={"total_steps": steps})
        check_warmup(counted)
        return counted

    def with_compile(self, *, on_gpu: bool) -> RunConfig:
        """Returns a copy with `actor.compile` chosen, if it is auto."""
        if self.actor.compile != "auto":
            return self
        return self.changed(actor={"compile": on_gpu})

    def with_context(self) -> RunConfig:
        """Returns a copy with `learner.context_parallel` and a token budget chosen, if they are open.

        Experts are not divided unless the file says so.

        Raises:
            ConfigError: the budget of all ranks together holds no row.
        """
        if self.budget_refusal:
            raise ConfigError(self.budget_refusal)
        given, size = self.actor.ppo_max_token_len_per_gpu, self.context_sizes[0]
        budget = max(given, -(-self.max_model_len // size))
        return self.changed(
            learner={"context_parallel": size, "expert_parallel": self.learner.num_expert_ranks},
            actor={"ppo_max_token_len_per_gpu": budget} if budget != given else {},
        )
