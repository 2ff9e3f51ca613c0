"""Converts the messages between attached clients and the gateway to protobuf, and back."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

from paceline.core.attached_clients.attachment import (
    CONTRACT,
    MAX_DATA_SOURCES,
    MAX_NAME_CHARS,
    MAX_WINDOW,
    Answers,
    FromClient,
    Hello,
    Leave,
    ToClient,
    Welcome,
    Window,
    Work,
)
from paceline.core.errors import InvalidMessageError, ProtocolError, RewardError, RewardErrorKind
from paceline.core.scoring import MAX_ITEMS_PER_CALL, ScoreItem, ScoreResult
from paceline.core.text import one_line
from paceline.rpc.v1 import attachment_pb2, reward_pb2
from paceline.wire.calls.protobuf import (
    score_item_from_proto,
    score_item_to_proto,
    score_items_from_proto,
    score_result_from_proto,
    score_result_to_proto,
)
from paceline.wire.fields import reject
from paceline.wire.records import from_proto, to_proto

T = TypeVar("T")
P = TypeVar("P")

Result = ScoreResult | RewardError
"""A score, or the reason why the answer cannot be used."""

Task = ScoreItem | tuple[ScoreItem, ...]
"""An item, or the items of a group."""

GroupAnswer = ScoreResult | tuple[ScoreResult, ...]
"""What a client answers to a task."""

GroupResult = Result | tuple[tuple[str, Result], ...]
"""A `GroupAnswer` after decoding; a group's results are paired with trajectory ids."""


def scorer_message_to_proto(message: FromClient[GroupAnswer]) -> reward_pb2.ScorerMessage:
    """Encodes a message of an attached scorer."""
    return client_message_to_proto(
        message, reward_pb2.ScorerMessage, reward_pb2.ScoreAnswers, _answer_to_proto
    )


def _answer_to_proto(ticket: int, answer: GroupAnswer) -> reward_pb2.ScoreAnswer:
    if isinstance(answer, ScoreResult):
        return reward_pb2.ScoreAnswer(ticket=ticket, result=score_result_to_proto(answer))
    return reward_pb2.ScoreAnswer(ticket=ticket, group=[score_result_to_proto(result) for result in answer])


def scorer_message_from_proto(message: reward_pb2.ScorerMessage) -> FromClient[GroupResult]:
    """Decodes a message of an attached scorer.

    Raises:
        InvalidMessageError: the message is empty, a number is out of range, or there are too many results.
        ProtocolError: the scorer speaks another version of the contract.
    """
    num_results = sum(len(row.group) for row in message.answers.answers[:MAX_WINDOW])
    if num_results > MAX_ITEMS_PER_CALL:
        detail = (
            f"{num_results} results, at most {MAX_ITEMS_PER_CALL} in a message: send fewer answers in each"
        )
        reject("ScorerMessage", "too_large", detail)
    return client_message_from_proto(message, _answer_from_proto)


def _answer_from_proto(row: reward_pb2.ScoreAnswer) -> GroupResult:
    if not row.group:
        return result_or_error(row.result)
    return tuple((result.trajectory_id, result_or_error(result)) for result in row.group)


def gateway_message_to_proto(message: ToClient[Task]) -> reward_pb2.GatewayMessage:
    """Encodes a message to an attached scorer."""
    return server_message_to_proto(message, reward_pb2.GatewayMessage, reward_pb2.ScoreTasks, _task_to_proto)


def _task_to_proto(ticket: int, task: Task) -> reward_pb2.ScoreTask:
    if isinstance(task, ScoreItem):
        return reward_pb2.ScoreTask(ticket=ticket, item=score_item_to_proto(task))
    return reward_pb2.ScoreTask(ticket=ticket, group=[score_item_to_proto(item) for item in task])


def _task_from_proto(row: reward_pb2.ScoreTask) -> Task:
    if not row.group:
        return score_item_from_proto(row.item)
    return tuple(score_items_from_proto(row.group))


def gateway_message_from_proto(message: reward_pb2.GatewayMessage) -> ToClient[Task]:
    """Decodes a message to an attached scorer.

    Raises:
        InvalidMessageError: the message is empty, or an item is malformed.
        ProtocolError: the gateway speaks another version of the contract.
    """
    return server_message_from_proto(message, _task_from_proto)


def result_or_error(message: reward_pb2.ScoreResult) -> Result:
    """Decodes a score; returns a `RewardError` if it cannot be used."""
    try:
        return score_result_from_proto(message)
    except InvalidMessageError as error:
        is_not_finite = error.reason == "not_finite"
        kind = RewardErrorKind.NOT_FINITE if is_not_finite else RewardErrorKind.WRONG_TYPE
        return RewardError(str(error), kind=kind)


# --- shared by the streams of all kinds of clients


def client_message_to_proto(
    message: FromClient[T],
    kind: Callable[..., P],
    answers: Callable[..., Any],
    write: Callable[[int, T], Any],
) -> P:
    """Encodes a client's message as a `kind`, with field `answers` of this type; `write` encodes a row."""
    match message:
        case Hello():
            hello = to_proto(message, attachment_pb2.AttachHello, data_sources=sorted(message.data_sources))
            return kind(hello=hello)
        case Window():
            return kind(window=attachment_pb2.AttachWindow(window=message.window))
        case Leave():
            return kind(leave=to_proto(message, attachment_pb2.AttachLeave))
        case Answers(rows):
            return kind(answers=answers(answers=[write(*row) for row in rows]))


def client_message_from_proto(message: Any, read: Callable[[Any], T]) -> FromClient[T]:
    """Decodes a client's message; `read` decodes an answer without its ticket.

    Raises:
        InvalidMessageError: the message is empty, a number is out of range, or there are too many answers.
        ProtocolError: the client speaks another version of the contract.
    """
    match message.WhichOneof("message"):
        case "hello":
            return hello_from_proto(message.hello)
        case "window":
            return Window(window=_window(message.window.window))
        case "leave":
            return _leave_from_proto(message.leave)
        case "answers":
            if (count := len(message.answers.answers)) > MAX_WINDOW:
                detail = f"{count} answers, at most {MAX_WINDOW} in a message: no client has more tasks"
                reject(message.DESCRIPTOR.name, "too_large", detail)
            return Answers(tuple((row.ticket, read(row)) for row in message.answers.answers))
        case _:
            raise _empty(message)


def server_message_to_proto(
    message: ToClient[T], kind: Callable[..., P], work: Callable[..., Any], write: Callable[[int, T], Any]
) -> P:
    """Encodes a message to a client as a `kind`, with field `work` of this type; `write` encodes a task."""
    match message:
        case Welcome():
            return kind(welcome=to_proto(message, attachment_pb2.AttachWelcome))
        case Leave():
            return kind(leave=to_proto(message, attachment_pb2.AttachLeave))
        case Work(tasks):
            return kind(work=work(tasks=[write(*task) for task in tasks]))


def server_message_from_proto(message: Any, read: Callable[[Any], T]) -> ToClient[T]:
    """Decodes a message to a client; `read` decodes a task without its ticket.

    Raises:
        InvalidMessageError: the message is empty, or `read` raised this error.
        ProtocolError: the server speaks another version of the contract.
    """
    match message.WhichOneof("message"):
        case "welcome":
            return welcome_from_proto(message.welcome)
        case "leave":
            return _leave_from_proto(message.leave)
        case "work":
            return Work(tuple((row.ticket, read(row)) for row in message.work.tasks))
        case _:
            raise _empty(message)


def _empty(message: Any) -> InvalidMessageError:
    return InvalidMessageError(f"invalid {message.DESCRIPTOR.name}: it is empty", reason="missing_field")


def hello_from_proto(message: attachment_pb2.AttachHello) -> Hello:
    """Reads the hello of a client.

    Raises:
        ProtocolError: the client speaks another version of the contract.
        InvalidMessageError: a number is out of range, or a text is too long.
    """
    _check_contract(message.contract, "client")
    texts = [message.name, message.client, message.version, *message.data_sources]
    if any(len(text) > MAX_NAME_CHARS for text in texts) or len(message.data_sources) > MAX_DATA_SOURCES:
        reject(
            "AttachHello",
            "too_large",
            f"at most {MAX_DATA_SOURCES} data sources, and {MAX_NAME_CHARS} characters in each text",
        )
    return from_proto(
        message,
        Hello,
        client=one_line(message.client) or "unnamed",
        data_sources=frozenset(message.data_sources),
        window=_window(message.window),
    )


def welcome_from_proto(message: attachment_pb2.AttachWelcome) -> Welcome:
    """Reads the welcome of a service.

    Raises:
        ProtocolError: the gateway speaks another version of the contract.
        InvalidMessageError: a duration is out of range.
    """
    _check_contract(message.contract, "gateway")
    if not (math.isfinite(message.answer_within_s) and message.answer_within_s > 0):
        reject("AttachWelcome", "out_of_range", f"answer_within_s is {message.answer_within_s}")
    return from_proto(message, Welcome, run_id=one_line(message.run_id))


def _leave_from_proto(message: attachment_pb2.AttachLeave) -> Leave:
    return from_proto(message, Leave, reason=one_line(message.reason))


def _window(window: int) -> int:
    if not 1 <= window <= MAX_WINDOW:
        reject("AttachHello", "out_of_range", f"the window is {window}, write 1 to {MAX_WINDOW}")
    return window


def _check_contract(contract: int, who: str) -> None:
    if contract != CONTRACT:
        raise ProtocolError(
            f"the {who} speaks version {contract} of the contract of attached clients, this side version "
            f"{CONTRACT}: install the same version of Paceline on both sides"
        )
