"""Converts the messages between a rollout server and its attached environments to protobuf, and back."""

from __future__ import annotations

from paceline.core.errors import InvalidMessageError
from paceline.core.samples.episode import Play, Played
from paceline.core.text import encodable
from paceline.rpc.v1 import environment_pb2 as pb
from paceline.wire.calls.attachment import AttachmentMessages
from paceline.wire.calls.environment import grade_from_proto
from paceline.wire.json_object import read_json_object, write_json_object


def _play_to_proto(ticket: int, play: Play) -> pb.PlayTask:
    episode = pb.EpisodeAttempt(run_id=play.run_id, trajectory_id=play.trajectory_id, attempt=play.attempt)
    return pb.PlayTask(
        ticket=ticket,
        open=pb.OpenEpisodeRequest(
            episode=episode,
            task_json=write_json_object(play.task, "task"),
            task_seed=play.task_seed,
            episode_seed=play.episode_seed,
        ),
        run=pb.RunEpisodeRequest(episode=episode, base_url=play.base_url, token=play.token, model=play.model),
    )


def _play_from_proto(message: pb.PlayTask) -> Play:
    episode = message.open.episode
    return Play(
        run_id=episode.run_id,
        trajectory_id=episode.trajectory_id,
        attempt=episode.attempt,
        task=read_json_object(message.open.task_json, "task"),
        task_seed=message.open.task_seed,
        episode_seed=message.open.episode_seed,
        base_url=message.run.base_url,
        token=message.run.token,
        model=message.run.model,
    )


def _played_to_proto(ticket: int, played: Played) -> pb.PlayAnswer:
    return pb.PlayAnswer(
        ticket=ticket,
        stop_reason=played.stop_reason,
        grade=pb.EpisodeGrade(reward=played.reward, components=dict(played.components)),
        error=encodable(played.error),
    )


def _played_from_proto(message: pb.PlayAnswer) -> Played:
    try:
        reward, components = grade_from_proto(message.grade)
    except InvalidMessageError as error:
        return Played(error=str(error))
    return Played(stop_reason=message.stop_reason, reward=reward, components=components, error=message.error)


PLAYER_MESSAGES: AttachmentMessages[Play, Played, Played] = AttachmentMessages(
    client=pb.PlayerMessage,
    answers=pb.PlayAnswers,
    server=pb.PlayGatewayMessage,
    work=pb.PlayTasks,
    write_answer=_played_to_proto,
    read_answer=_played_from_proto,
    write_task=_play_to_proto,
    read_task=_play_from_proto,
)
"""The messages between attached environments and a rollout server"""
