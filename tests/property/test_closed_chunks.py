"""Which chunks are given to the learner ahead: each once, complete, in their places, gradients in order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paceline.controller.batch.barrier import Barrier
from paceline.controller.batch.closed_chunks import ClosedChunk, ClosedChunks
from paceline.core.samples.trajectory import ScoredHeader
from support.headers import POLICY, scored

PROMPTS = (3, 5, 8, 9, 12, 20)


def barrier_of(num_samples: int = 2) -> Barrier:
    return Barrier(step=4, policy=POLICY, counts={"train": num_samples}, prompts=PROMPTS)


def admit(barrier: Barrier, header: ScoredHeader) -> None:
    barrier.apply(header, barrier.judge(header))


def chunks_of(width: int = 2, num_gradients: int = 2, num_unscored: int = 0) -> ClosedChunks:
    return ClosedChunks(PROMPTS, width=width, num_gradients=num_gradients, num_unscored=num_unscored)


def taken(chunks: ClosedChunks, barrier: Barrier) -> list[ClosedChunk]:
    result = []
    while (chunk := chunks.take(barrier)) is not None:
        result.append(chunk)
    return result


def test_by_hand() -> None:
    barrier, chunks = barrier_of(), chunks_of()
    for prompt_id in (8, 9):
        for sample in (0, 1):
            admit(barrier, scored(prompt_id, sample))
    # Its gradient has to wait for the first chunk's, its scores have not.
    assert taken(chunks, barrier) == [ClosedChunk(number=1, prompts=(8, 9), with_gradient=False)]
    for header in (scored(5, 0), scored(5, 1), scored(3, 1)):
        admit(barrier, header)
    assert taken(chunks, barrier) == []
    admit(barrier, scored(3, 0))
    assert taken(chunks, barrier) == [
        ClosedChunk(number=0, prompts=(3, 5), with_gradient=True),
        ClosedChunk(number=1, prompts=(8, 9), with_gradient=True),
    ]
    for prompt_id in (12, 20):
        for sample in (0, 1):
            admit(barrier, scored(prompt_id, sample))
    assert taken(chunks, barrier) == [ClosedChunk(number=2, prompts=(12, 20), with_gradient=False)]


def test_a_failed_group_holds_back_what_comes_behind_it_until_a_good_copy_comes() -> None:
    barrier, chunks = barrier_of(1), chunks_of()
    for prompt_id in (3, 8, 9, 12, 20):
        admit(barrier, scored(prompt_id))
    admit(barrier, scored(5, reward_error=("raised", "no")))
    assert taken(chunks, barrier) == []
    admit(barrier, scored(5))
    assert [(c.number, c.with_gradient) for c in taken(chunks, barrier)] == [(0, True), (1, True), (2, False)]


def test_chunks_without_scores_are_given_for_their_gradient_alone() -> None:
    barrier, chunks = barrier_of(1), chunks_of(num_gradients=1, num_unscored=2)
    for prompt_id in (8, 9):
        admit(barrier, scored(prompt_id))
    assert taken(chunks, barrier) == []
    for prompt_id in (3, 5, 12, 20):
        admit(barrier, scored(prompt_id))
    assert [(c.number, c.with_gradient) for c in taken(chunks, barrier)] == [(0, True), (2, False)]


@given(
    order=st.permutations([(prompt, sample) for prompt in PROMPTS for sample in (0, 1)]),
    width=st.sampled_from([1, 2, 3]),
    num_gradients=st.integers(0, 3),
    failing=st.sampled_from([None, *PROMPTS]),
)
def test_in_every_order_of_arrival(
    order: list[tuple[int, int]], width: int, num_gradients: int, failing: int | None
) -> None:
    """Each chunk at most once with its gradient and once without, complete, and none behind a failure."""
    barrier = barrier_of()
    chunks = chunks_of(width=width, num_gradients=min(num_gradients, len(PROMPTS) // width))
    given_chunks: list[ClosedChunk] = []
    for prompt_id, sample in order:
        error = ("raised", "no") if prompt_id == failing and sample == 1 else None
        admit(barrier, scored(prompt_id, sample, reward_error=error))
        for chunk in taken(chunks, barrier):
            assert all(barrier.is_complete(prompt) for prompt in chunk.prompts)
            assert failing not in chunk.prompts
            given_chunks.append(chunk)
    gradients = [chunk.number for chunk in given_chunks if chunk.with_gradient]
    scores = [chunk.number for chunk in given_chunks if not chunk.with_gradient]
    assert gradients == list(range(len(gradients)))
    assert len(scores) == len(set(scores))
    last = len(PROMPTS) if failing is None else PROMPTS.index(failing)
    behind = {number for number in range(len(PROMPTS) // width) if (number + 1) * width <= last}
    # All that no failure holds back were given; those that it does may have been before it came.
    assert behind <= {*gradients, *scores}
