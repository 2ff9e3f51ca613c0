"""Works ahead of the barrier: on complete chunks of a step while others are still being generated.

    ChunkOrder -> plan, fetch, score (as in the step itself) -> forward and backward, if it is the next chunk

docs/decisions/0024-work-ahead-of-the-barrier.md says what may be done ahead, and why the step's numbers do
not depend on it.
"""

from __future__ import annotations

import logging
import time
from functools import partial

from paceline.core.training import ChunkOrder
from paceline.learner.train.algorithm import algorithm_of
from paceline.learner.train.estimating import prepare
from paceline.learner.train.scoring import Fetch, score_chunks
from paceline.learner.train.state.ahead import ScoredChunk
from paceline.learner.train.state.learner import Learner
from paceline.learner.train.state.optimizer import OutOfMemoryError
from paceline.learner.train.stopwatch import Stopwatch
from paceline.learner.train.updating.losses import PolicyLoss
from paceline.learner.train.updating.update import nominal_counts

log = logging.getLogger(__name__)


def work_ahead(learner: Learner, order: ChunkOrder, fetch: Fetch) -> None:
    """Scores a chunk and, if ordered, adds its gradient; every rank calls it.

    Does not repeat earlier work.

    Raises:
        DataError, ProtocolError, BrokerError: the rows are unusable; nothing has changed.
    """
    ahead, stopwatch, began = learner.ahead, Stopwatch(learner.ranks.device), time.monotonic()
    ahead.turn_to(order.step, order.policy)
    config = learner.config
    number = order.first_row // (config.prompts_per_chunk * config.rollout.n)
    (scored,) = score_chunks(
        learner,
        order.step,
        lambda planner: {number: planner.chunk(order.rows, order.first_row)},
        dict(enumerate(order.rows, order.first_row)),
        fetch,
        stopwatch,
    )
    ahead.keep(scored, order.rows)
    # The update takes the last chunk of the mini-batch, because it reduces the gradients.
    if order.with_gradient and number + 1 < config.actor.ppo_mini_batch_size // config.prompts_per_chunk:
        _add_gradient(learner, order, scored, stopwatch)
    ahead.note(stopwatch, time.monotonic() - began)


def _add_gradient(learner: Learner, order: ChunkOrder, scored: ScoredChunk, stopwatch: Stopwatch) -> None:
    gradient = learner.ahead.gradient_at(order.first_row, order.adjustments)
    if gradient is None:
        return
    algorithm = algorithm_of(learner.config, clip_scale=order.adjustments.clip_scale)
    prepared = prepare(learner, order, scored.parts, algorithm.advantages, first_row=order.first_row)
    parts = prepared.batches
    loss = PolicyLoss(learner.config, learner.actor.network, order.adjustments, algorithm.loss)
    losses = [partial(loss, part, nominal_counts(learner.config)) for part in parts]
    unscored = [part.log_probs for part in parts if "old" not in part.log_probs]
    with stopwatch.phase("update_actor"):
        try:
            sums = learner.actor.add_gradient(losses, ranks=learner.ranks, completes=False)
        except OutOfMemoryError as error:
            log.warning("step %d: no gradient ahead of the barrier: %s", order.step, error)
            for log_probs in unscored:
                log_probs.pop("old", None)
            learner.ahead.refuse_gradient()
            return
    gradient.add(scored, parts, sums)
