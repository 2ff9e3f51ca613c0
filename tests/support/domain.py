"""Hypothesis strategies for everything that travels."""

from __future__ import annotations

import dataclasses

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from paceline.core.errors import RewardErrorKind
from paceline.core.ids import Purpose, TrajectoryId
from paceline.core.policy import PolicyTag
from paceline.core.samples.episode import EpisodeOutcome
from paceline.core.samples.expert_choices import ExpertChoices
from paceline.core.samples.images import Image
from paceline.core.samples.trajectory import (
    FinishReason,
    Float32Array,
    GroupRefusal,
    Int32Array,
    PromptGroup,
    RewardContext,
    SamplingSpec,
    ScoredHeader,
    Trajectory,
    TrajectoryHeader,
    UInt8Array,
)

counts = st.integers(0, 2**63 - 1)
names = st.text(min_size=1, max_size=20)
texts = st.text(max_size=60)
seconds = st.floats(0, 1e9)
finite = st.floats(allow_nan=False, allow_infinity=False)
digests = st.text("0123456789abcdef", min_size=16, max_size=16)
policies = st.builds(PolicyTag, version=counts, digest=digests)
trajectory_ids = st.builds(
    TrajectoryId,
    step=counts,
    purpose=st.sampled_from([*map(str, Purpose), "revise"]),
    prompt_id=counts,
    sample_index=counts,
)
samplings = st.builds(
    SamplingSpec,
    temperature=st.floats(0, 100),
    max_tokens=st.integers(1, 2**31),
    top_p=st.floats(0, 1, exclude_min=True),
    top_k=counts,
    stop_token_ids=st.lists(st.integers(0, 2**31 - 1), max_size=4).map(tuple),
)
plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | finite | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)
contexts = st.builds(
    RewardContext,
    ground_truth=texts,
    data_source=texts,
    prompt_text=texts,
    extra=st.dictionaries(texts, plain, max_size=3),
    val_set=texts,
)


def token_ids(length: int | st.SearchStrategy[int]) -> st.SearchStrategy[Int32Array]:
    """Arrays (length,) of any ids that the wire allows."""
    return hnp.arrays(np.int32, length, elements=st.integers(0, 2**31 - 1))


def log_probs(length: int) -> st.SearchStrategy[Float32Array]:
    """Arrays (length,) of finite numbers up to 0."""
    return hnp.arrays(np.float32, length, elements=st.floats(-(2.0**100), 0, width=32))


def masks(length: int) -> st.SearchStrategy[UInt8Array]:
    """Arrays (length,) of 0 and 1."""
    return hnp.arrays(np.uint8, length, elements=st.integers(0, 1))


images = st.builds(
    Image,
    hash=st.text("0123456789abcdef", min_size=64, max_size=64),
    grid=st.tuples(st.integers(1, 4), st.integers(1, 300), st.integers(1, 300)),
)
image_lists = st.lists(images, max_size=2).map(tuple)
prompt_groups = st.builds(
    PromptGroup,
    run_id=names,
    step=counts,
    purpose=st.sampled_from([*map(str, Purpose), "revise"]),
    prompt_id=counts,
    prompt_token_ids=token_ids(st.integers(1, 20)),
    sampling=samplings,
    seeds=st.lists(counts, min_size=1, max_size=9).map(tuple),
    policy=policies,
    context=contexts,
    messages=st.lists(st.dictionaries(names, plain, max_size=2), max_size=2).map(tuple),
    images=image_lists,
)


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    """Samples whose three response arrays are equally long."""
    length = draw(st.integers(1, 30))
    mask = draw(masks(length))
    prompts = [place for place in range(1, length) if not mask[place]]
    starts = draw(st.sets(st.sampled_from(prompts), max_size=3)) if prompts else set()
    return Trajectory(
        run_id=draw(names),
        trajectory_id=draw(trajectory_ids),
        policy=draw(policies),
        prompt_token_ids=draw(token_ids(st.integers(1, 20))),
        response_token_ids=draw(token_ids(length)),
        response_log_probs=draw(log_probs(length)) * mask,
        response_mask=mask,
        finish_reason=draw(st.sampled_from(FinishReason)),
        sampling=draw(samplings),
        seed=draw(counts),
        segment_starts=tuple(sorted(starts)),
        images=draw(image_lists),
    )


@st.composite
def trajectories_with_choices(draw: st.DrawFn) -> Trajectory:
    """Samples with choices of experts, of one byte or two."""
    trajectory = draw(trajectories())
    num_tokens = len(trajectory.prompt_token_ids) + len(trajectory.response_token_ids)
    dtype = draw(st.sampled_from([np.uint8, np.uint16]))
    shape = (num_tokens, draw(st.integers(1, 3)), draw(st.integers(2, 4)))
    array = np.random.default_rng(draw(st.integers(0, 99))).integers(0, 250, shape).astype(dtype)
    return dataclasses.replace(trajectory, expert_choices=ExpertChoices.of(array))


episodes = st.none() | st.builds(
    EpisodeOutcome,
    stop_reason=names,
    num_turns=st.integers(1, 99),
    num_tool_calls=st.integers(0, 99),
    tool_s=seconds,
    reward=st.none() | finite,
    components=st.dictionaries(names, finite, max_size=3),
)
num_tokens = st.integers(1, 2**20)
blob_digests = st.text("0123456789abcdef", min_size=32, max_size=32)
trajectory_headers = st.builds(
    TrajectoryHeader,
    run_id=names,
    trajectory_id=trajectory_ids,
    policy=policies,
    blob_key=names,
    blob_digest=blob_digests,
    num_prompt_tokens=num_tokens,
    num_response_tokens=num_tokens,
    num_sampled_tokens=num_tokens,
    finish_reason=st.sampled_from(FinishReason),
    server_id=names,
    seconds=seconds,
    context=contexts,
    episode=episodes,
    num_patches=num_tokens,
)
reward_errors = st.tuples(st.sampled_from([kind.value for kind in RewardErrorKind]), texts)


@st.composite
def scored_headers(draw: st.DrawFn) -> ScoredHeader:
    """Scored samples: a reward or the reason why there is none."""
    error = draw(st.none() | reward_errors)
    return ScoredHeader(
        run_id=draw(names),
        trajectory_id=draw(trajectory_ids),
        policy=draw(policies),
        blob_key=draw(names),
        blob_digest=draw(blob_digests),
        num_prompt_tokens=draw(num_tokens),
        num_response_tokens=draw(num_tokens),
        num_sampled_tokens=draw(num_tokens),
        finish_reason=draw(st.sampled_from(FinishReason)),
        server_id=draw(names),
        generation_s=draw(seconds),
        reward=draw(finite) if error is None else None,
        components=draw(st.dictionaries(names, finite, max_size=4)),
        reward_error=error,
        scorer=draw(names),
        reward_s=draw(seconds),
        text_key=draw(st.just("") | names),
        episode=draw(episodes),
        token_rewards=draw(st.lists(st.tuples(st.just(0), finite), max_size=2).map(tuple)),
        normalized=draw(st.lists(st.tuples(names, finite, finite), max_size=2).map(tuple)),
        num_patches=draw(num_tokens),
        teacher_digest=draw(st.just("") | blob_digests),
    )


group_refusals = st.builds(
    GroupRefusal,
    run_id=names,
    step=counts,
    purpose=st.sampled_from([*map(str, Purpose), "revise"]),
    prompt_id=counts,
    policy=policies,
    server_id=names,
    reason=names,
    message=texts,
    deliveries=counts,
)
