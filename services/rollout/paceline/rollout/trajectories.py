"""Converts a prompt group to requests for the engine, and its samples to messages with trajectories."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from paceline.broker import names
from paceline.broker.base import Outgoing
from paceline.core.errors import InvalidMessageError, NumericsError, PeerLostError
from paceline.core.ids import NEVER_TRAINED
from paceline.core.policy import PolicyRange, PolicyTag
from paceline.core.samples.expert_choices import ExpertChoices, joined_choices
from paceline.core.samples.images import LoadedImage
from paceline.core.samples.trajectory import FinishReason, PromptGroup, Trajectory, TrajectoryHeader
from paceline.rollout.engines.base import Sample, SampleRequest
from paceline.rollout.episodes.recorder import Draw
from paceline.service.observability import telemetry
from paceline.wire import (
    blob_digest,
    decode_trajectory,
    encode_trajectory,
    encode_trajectory_group,
    encode_trajectory_header,
)


def sample_requests(
    group: PromptGroup, serial: int, images: Sequence[LoadedImage] = (), *, salt: str = ""
) -> list[SampleRequest]:
    """Returns one request per sample of the group.

    Args:
        serial: differs between deliveries, because a group may come again while its first delivery is under
            way.
        salt: requests share cached prefixes only with the same salt; "": the policy that the group needs.
    """
    salt, prompt = salt or str(group.policy), group.prompt_token_ids.tolist()
    return [
        SampleRequest(
            request_id=f"{group.trajectory_id(index)}#{serial}",
            prompt_token_ids=prompt,
            sampling=group.sampling,
            seed=seed,
            cache_salt=salt,
            images=images,
        )
        for index, seed in enumerate(group.seeds)
    ]


def check_samples(group: PromptGroup, samples: Sequence[Sample]) -> None:
    """Raises an error for samples that the barrier would refuse, so that none leaves this server.

    Raises:
        PeerLostError: the engine aborted a sample without being told to.
        NumericsError: log-probabilities are missing or not finite.
    """
    for sample in samples:
        if sample.finish_reason is FinishReason.ABORT:
            raise PeerLostError(
                f"the engine aborted prompt {group.prompt_id} without being told to; its log says why",
                peer="engine",
            )
        if not np.isfinite(sample.log_probs).all() or len(sample.log_probs) != len(sample.token_ids):
            raise NumericsError(
                f"prompt {group.prompt_id}: log-probabilities of {len(sample.token_ids)} tokens are not all "
                f"finite numbers; the weights {group.policy} are unusable"
            )


def trajectory_messages(
    group: PromptGroup,
    draws: Sequence[Draw],
    *,
    server_id: str,
    draw: str,
    store: str = "",
    seconds: float,
    together: bool = False,
    policies: Mapping[int, PolicyTag] | None = None,
) -> list[Outgoing]:
    """Returns one message per sample: the header as payload, the trajectory as its blob.

    Args:
        together: make one message with all headers and blobs, for scorers that score the samples together.
        draw: differs between all draws under this server's name, those of its predecessors included, so that
            the blobs of one draw never replace those of another.
        store: name of the blob store for the blobs; "": the broker.
        seconds: time that the engine took for the group.
        policies: policies by version, if others than the group's may have drawn samples.

    Raises:
        InvalidMessageError: readers would refuse a sample.
    """
    stream, traceparent = names.trajectories(group.run_id), telemetry.current_traceparent()
    headers, blobs = [], []
    for index, drawn in enumerate(draws):
        trajectory = _trajectory(group, index, drawn, _ranges(drawn, policies or {}))
        blob = encode_trajectory(trajectory)
        decode_trajectory(blob)
        key = names.blob(group.run_id, str(trajectory.trajectory_id), server_id, draw, store)
        header = TrajectoryHeader(
            run_id=group.run_id,
            trajectory_id=trajectory.trajectory_id,
            policy=trajectory.policy,
            ranges=trajectory.ranges,
            blob_key=key,
            blob_digest=blob_digest(blob),
            num_prompt_tokens=len(drawn.prompt_token_ids),
            num_response_tokens=len(drawn.token_ids),
            num_sampled_tokens=int(drawn.mask.sum()),
            finish_reason=drawn.finish_reason,
            server_id=server_id,
            seconds=seconds,
            context=group.context,
            episode=drawn.episode,
            num_patches=sum(image.num_patches for image in group.images),
        )
        headers.append(header)
        blobs.append({header.blob_key: blob})
    if together:
        payload, merged = encode_trajectory_group(headers), {key: b for of in blobs for key, b in of.items()}
        return [Outgoing(stream=stream, payload=payload, traceparent=traceparent, blobs=merged)]
    return [
        Outgoing(
            stream=stream, payload=encode_trajectory_header(header), traceparent=traceparent, blobs=own_blobs
        )
        for header, own_blobs in zip(headers, blobs, strict=True)
    ]


def _ranges(drawn: Draw, policies: Mapping[int, PolicyTag]) -> list[PolicyRange]:
    """Returns which of these policies drew which tokens; [] if there are no `policies`."""
    if not policies:
        return []
    if unknown := [version for _, version in drawn.versions if version not in policies]:
        raise InvalidMessageError(
            f"version {unknown[0]} drew the first tokens, which is older than the bound allows",
            reason="too_old",
        )
    ends = [first for first, _ in drawn.versions[1:]] + [len(drawn.token_ids)]
    return [
        PolicyRange(policies[version], first, end)
        for (first, version), end in zip(drawn.versions, ends, strict=True)
    ]


def _trajectory(group: PromptGroup, index: int, drawn: Draw, ranges: Sequence[PolicyRange]) -> Trajectory:
    return Trajectory(
        run_id=group.run_id,
        trajectory_id=group.trajectory_id(index),
        policy=ranges[0].policy if ranges else group.policy,
        ranges=tuple(ranges) if len(ranges) > 1 else (),
        prompt_token_ids=drawn.prompt_token_ids,
        response_token_ids=drawn.token_ids,
        response_log_probs=drawn.log_probs,
        response_mask=drawn.mask,
        finish_reason=drawn.finish_reason,
        sampling=group.sampling,
        seed=group.seeds[index],
        segment_starts=drawn.segment_starts,
        images=group.images,
        expert_choices=None if group.purpose in NEVER_TRAINED else _choices(drawn),
    )


def _choices(drawn: Draw) -> ExpertChoices | None:
    """Returns the choices of all tokens, those that the engine did not compute included."""
    length = len(drawn.prompt_token_ids) + len(drawn.token_ids)
    choices = joined_choices([drawn.expert_choices], [length])
    return None if choices is None else ExpertChoices.of(choices)
