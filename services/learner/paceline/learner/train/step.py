"""Runs a training step on a rank through an algorithm; every rank runs it with the same order.

score: plan -> fetch -> forward passes   estimate: advantages -> shaping   update: optimizer steps -> metrics

Matching work done ahead of the barrier is reused.
"""

from __future__ import annotations

from functools import partial

from paceline.algorithms.algorithm import Estimator, LossFunction, TrainedNetwork
from paceline.core.training import TrainOrder, TrainResult
from paceline.learner.batch.minibatch import cut_mini_batches
from paceline.learner.distributed.collectives import require_same
from paceline.learner.train.algorithm import algorithm_of
from paceline.learner.train.estimating.advantages import mean_reference_kl
from paceline.learner.train.estimating.shaping import prepare
from paceline.learner.train.result import Deposit, conclude
from paceline.learner.train.scoring.chunks import Fetch, critic_alone, score_step
from paceline.learner.train.scoring.score import score_rest
from paceline.learner.train.state.learner import Learner
from paceline.learner.train.stopwatch import Stopwatch
from paceline.learner.train.updating.update import UpdateReport, update_critic, update_policy
from paceline.learner.train.updating.update_guard import UpdateGuard


def train_step(
    learner: Learner, order: TrainOrder, fetch: Fetch, deposit: Deposit | None = None
) -> TrainResult:
    """Runs the step and moves the learner to version `order.step`.

    It returns on a rank only after `deposit` has returned on all.

    Raises:
        DataError, ProtocolError, BrokerError: the rows are unusable; nothing has changed.
        NumericsError: the numbers of the step contradict each other.
        ConfigError: the user's own algorithm failed.
    """
    step = TrainingStep(learner, order, fetch)
    step.algorithm.step(step)
    return step.finish(deposit)


class TrainingStep:
    """Implements the verbs of a training step on this rank.

    The verbs handle stopwatch, guard, memory and work ahead.
    """

    def __init__(self, learner: Learner, order: TrainOrder, fetch: Fetch) -> None:
        config, ranks, adjustments = learner.config, learner.ranks, order.adjustments
        learner.ahead.turn_to(order.step, order.policy)
        self._learner, self._order, self._fetch = learner, order, fetch
        self._stopwatch = Stopwatch(ranks.device, peaks=dict(learner.ahead.peaks))
        self._guard = UpdateGuard(config.guard, learner.histories, ranks, adjustments)
        self._reference_kl: float | None = None
        self._reports: dict[str, UpdateReport] = {}
        self._is_warm_up = critic_alone(learner, order.step)
        self.has_critic = learner.critic is not None
        self.algorithm = algorithm_of(
            config, adjustments.clip_scale, critic_alone=self._is_warm_up, agree=partial(require_same, ranks)
        )

    def score(self) -> None:
        """Scores the samples by all networks, and lets the guard judge them."""
        learner, guard = self._learner, self._guard
        self._scored = score_step(learner, self._order, self._fetch, self._stopwatch)
        guard.judge_batch([row.reward for row in self._order.rows])
        if learner.config.needs_all_old_log_probs:
            self._judge_reference_kl()
        if guard.refusal:
            learner.ahead.drop_gradient()
            score_rest(learner, self._scored.parts)

    def estimate(self, estimator: Estimator) -> None:
        """Estimates advantages, and cuts the batch into mini-batches."""
        learner, order = self._learner, self._order
        with self._stopwatch.phase("adv"):
            self._prepared = prepare(learner, order, self._scored.parts, estimator)
        plan, batches = self._scored.plan, self._prepared.batches
        self._mini_batches = cut_mini_batches(learner.config, plan, batches, learner.ranks)

    def update(self, network: TrainedNetwork, loss: LossFunction | None = None) -> None:
        """Takes all optimizer steps of a network; none for the policy during the critic's warm-up."""
        learner, order, guard = self._learner, self._order, self._guard
        if network == "critic" and learner.critic is not None:
            with self._stopwatch.phase("update_critic"):
                self._reports["critic"] = update_critic(
                    learner, learner.critic, self._mini_batches["critic"], guard, step=order.step
                )
        elif loss is not None and not self._is_warm_up:
            first = self._scored.first(learner.config.actor.ppo_mini_batch_size)
            begun = learner.ahead.begun(first, self._prepared.batches, order.adjustments)
            with self._stopwatch.phase("update_actor"):
                self._reports["actor"] = update_policy(
                    learner, self._mini_batches["actor"], guard, loss, step=order.step, begun=begun
                )

    def finish(self, deposit: Deposit | None = None) -> TrainResult:
        """Moves the learner to the step's version and reports."""
        if not self._learner.config.needs_all_old_log_probs:
            self._judge_reference_kl()
        return conclude(
            self._learner,
            self._order,
            self._scored,
            self._prepared,
            self._reports,
            self._guard,
            self._stopwatch,
            reference_kl=self._reference_kl,
            deposit=deposit,
        )

    def _judge_reference_kl(self) -> None:
        """Lets the guard judge the step's KL to the reference, if there is one."""
        learner, num_rows = self._learner, len(self._order.rows)
        self._reference_kl = mean_reference_kl(learner.config, self._scored.parts, num_rows, learner.ranks)
        self._guard.judge_reference_kl(self._reference_kl)
