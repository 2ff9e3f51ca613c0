"""Converts the messages between attached clients and the gateway to protobuf, and back."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

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

TaskT = TypeVar("TaskT")
AnswerT = TypeVar("AnswerT")
ReadT = TypeVar("ReadT")

Result = ScoreResult | RewardError
"""A score, or the reason why the answer cannot be used."""

Task = ScoreItem | tuple[ScoreItem, ...]
"""An item, or the items of a group."""

GroupAnswer = ScoreResult | tuple[ScoreResult, ...]
"""What a client answers to a task."""

GroupResult = Result | tuple[tuple[str, Result], ...]
"""A `GroupAnswer` after decoding; a group's results are paired with trajectory ids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachmentMessages(Generic[TaskT, AnswerT, ReadT]):
    """Converts the messages from and to one kind of client.

    Attributes:
        client, answers: the protobuf types of a client's message and of its answers.
        server, work: those of a message to a client and of its tasks.
        write_answer, write_task: encode an answer or a task with its ticket.
        read_answer, read_task: decode an answer or a task without its ticket.
        check: raises InvalidMessageError for a client's message that must not be decoded.
    """

    client: Callable[..., Any]
    answers: Callable[..., Any]
    server: Callable[..., Any]
    work: Callable[..., Any]
    write_answer: Callable[[int, AnswerT], Any]
    read_answer: Callable[[Any], ReadT]
    write_task: Callable[[int, TaskT], Any]
    read_task: Callable[[Any], TaskT]
    check: Callable[[Any], None] = lambda message: None

    def client_to_proto(self, message: FromClient[AnswerT]) -> Any:
        """Encodes a message of an attached client."""
        match message:
            case Hello():
                sources = sorted(message.data_sources)
                return self.client(hello=to_proto(message, attachment_pb2.AttachHello, data_sources=sources))
            case Window():
                return self.client(window=attachment_pb2.AttachWindow(window=message.window))
            case Leave():
                return self.client(leave=to_proto(message, attachment_pb2.AttachLeave))
            case Answers(rows):
                return self.client(answers=self.answers(answers=[self.write_answer(*row) for row in rows]))

    def client_from_proto(self, message: Any) -> FromClient[ReadT]:
        """Decodes a client's message; an unusable score or grade becomes that answer's error.

        Raises:
            InvalidMessageError: the message is empty or too large, or a number is out of range.
            ProtocolError: the client speaks another version of the contract.
        """
        self.check(message)
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
                return Answers(tuple((row.ticket, self.read_answer(row)) for row in message.answers.answers))
            case _:
                raise _empty(message)

    def server_to_proto(self, message: ToClient[TaskT]) -> Any:
        """Encodes a message to an attached client."""
        match message:
            case Welcome():
                return self.server(welcome=to_proto(message, attachment_pb2.AttachWelcome))
            case Leave():
                return self.server(leave=to_proto(message, attachment_pb2.AttachLeave))
            case Work(tasks):
                return self.server(work=self.work(tasks=[self.write_task(*task) for task in tasks]))

    def server_from_proto(self, message: Any) -> ToClient[TaskT]:
        """Decodes a message to a client.

        Raises:
            InvalidMessageError: the message is empty, or a task is malformed.
            ProtocolError: the server speaks another version of the contract.
        """
        match message.WhichOneof("message"):
            case "welcome":
                return welcome_from_proto(message.welcome)
            case "leave":
                return _leave_from_proto(message.leave)
            case "work":
                return Work(tuple((row.ticket, self.read_task(row)) for row in message.work.tasks))
            case _:
                raise _empty(message)


def _answer_to_proto(ticket: int, answer: GroupAnswer) -> reward_pb2.ScoreAnswer:
    if isinstance(answer, ScoreResult):
        return reward_pb2.ScoreAnswer(ticket=ticket, result=score_result_to_proto(answer))
    return reward_pb2.ScoreAnswer(ticket=ticket, group=[score_result_to_proto(result) for result in answer])


def _check_num_results(message: reward_pb2.ScorerMessage) -> None:
    num_results = sum(len(row.group) for row in message.answers.answers[:MAX_WINDOW])
    if num_results > MAX_ITEMS_PER_CALL:
        detail = (
            f"{num_results} results, at most {MAX_ITEMS_PER_CALL} in a message: send fewer answers in each"
        )
        reject("ScorerMessage", "too_large", detail)


def _answer_from_proto(row: reward_pb2.ScoreAnswer) -> GroupResult:
    if not row.group:
        return result_or_error(row.result)
    return tuple((result.trajectory_id, result_or_error(result)) for result in row.group)


def _task_to_proto(ticket: int, task: Task) -> reward_pb2.ScoreTask:
    if isinstance(task, ScoreItem):
        return reward_pb2.ScoreTask(ticket=ticket, item=score_item_to_proto(task))
    return reward_pb2.ScoreTask(ticket=ticket, group=[score_item_to_proto(item) for item in task])


def _task_from_proto(row: reward_pb2.ScoreTask) -> Task:
    if not row.group:
        return score_item_from_proto(row.item)
    return tuple(score_items_from_proto(row.group))


SCORER_MESSAGES: AttachmentMessages[Task, GroupAnswer, GroupResult] = AttachmentMessages(
    client=reward_pb2.ScorerMessage,
    answers=reward_pb2.ScoreAnswers,
    server=reward_pb2.GatewayMessage,
    work=reward_pb2.ScoreTasks,
    write_answer=_answer_to_proto,
    read_answer=_answer_from_proto,
    write_task=_task_to_proto,
    read_task=_task_from_proto,
    check=_check_num_results,
)
"""The messages between attached scorers and their gateway"""


def result_or_error(message: reward_pb2.ScoreResult) -> Result:
    """Decodes a score; returns a `RewardError` if it cannot be used."""
    try:
        return score_result_from_proto(message)
    except InvalidMessageError as error:
        is_not_finite = error.reason == "not_finite"
        kind = RewardErrorKind.NOT_FINITE if is_not_finite else RewardErrorKind.WRONG_TYPE
        return RewardError(str(error), kind=kind)


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
