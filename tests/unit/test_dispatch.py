"""Which attached client gets which task: every task ends once, whatever the clients do."""

from __future__ import annotations

import random

import pytest

from paceline.core.attached_clients.dispatch import (
    MAX_STRAYS,
    MAX_TRIES,
    Assignment,
    Reception,
    TaskDispatcher,
)


def dispatcher() -> TaskDispatcher:
    return TaskDispatcher(answer_within_s=10.0)


def given(tasks: TaskDispatcher, now: float = 0.0) -> dict[int, list[int]]:
    """The tickets that each client is given."""
    by_client: dict[int, list[int]] = {}
    for assignment in tasks.assign(now):
        by_client.setdefault(assignment.client, []).append(assignment.ticket)
    return by_client


def test_clients_share_the_load_up_to_their_windows() -> None:
    tasks = dispatcher()
    small, large = tasks.join("small", window=2), tasks.join("large", window=4)
    tickets = [tasks.submit("", until=60.0) for _ in range(8)]
    shares = given(tasks)
    assert {client: len(share) for client, share in shares.items()} == {small: 2, large: 4}
    assert given(tasks) == {}
    assert tasks.answer(small, shares[small][0]) is Reception.TAKEN
    assert given(tasks) == {small: [tickets[6]]}
    tasks.resize(large, 5)
    assert given(tasks) == {large: [tickets[7]]}


def test_a_task_goes_to_a_client_that_takes_its_data_source() -> None:
    tasks = dispatcher()
    maths = tasks.join("maths", window=9, sources=frozenset({"gsm8k"}))
    code, gsm8k = tasks.submit("code", until=5.0), tasks.submit("gsm8k", until=5.0)
    assert tasks.assign(0.0) == [Assignment(maths, gsm8k)]
    (failure,) = tasks.overdue(5.0)
    assert (failure.ticket, failure.is_late) == (code, False)
    assert failure.message == "none of the 1 attached clients takes the data source 'code'"


def test_the_tasks_of_a_client_that_leaves_go_to_another_in_their_order() -> None:
    tasks = dispatcher()
    lost = tasks.join("lost", window=3)
    tickets = [tasks.submit("", until=60.0) for _ in range(4)]
    assert given(tasks) == {lost: tickets[:3]}
    assert tasks.leave(lost) == []
    heir = tasks.join("heir", window=4)
    assert given(tasks) == {heir: tickets}


def test_a_late_client_gets_no_more_and_its_answer_does_not_count() -> None:
    tasks = dispatcher()
    slow = tasks.join("slow", window=1)
    ticket = tasks.submit("", until=60.0)
    assert given(tasks) == {slow: [ticket]}
    assert tasks.overdue(9.9) == []
    assert tasks.overdue(10.0) == []
    assert given(tasks, 10.0) == {}  # its window is still taken
    other = tasks.join("other", window=1)
    assert given(tasks, 10.0) == {other: [ticket]}
    assert tasks.answer(slow, ticket) is Reception.LATE
    assert tasks.answer(other, ticket) is Reception.TAKEN
    assert tasks.answer(other, ticket) is Reception.STRAY
    assert given(tasks, 10.0) == {}


@pytest.mark.parametrize("is_late", [True, False])
def test_a_task_that_ends_every_client_fails_at_last(is_late: bool) -> None:
    tasks = dispatcher()
    ticket = tasks.submit("", until=1000.0)
    failures = []
    for attempt in range(MAX_TRIES):
        assert failures == []
        client = tasks.join("c", window=1)
        assert given(tasks, attempt * 10.0) == {client: [ticket]}
        failures = tasks.overdue((attempt + 1) * 10.0) if is_late else tasks.leave(client)
    assert [(failure.ticket, failure.is_late) for failure in failures] == [(ticket, is_late)]
    assert failures[0].message.startswith(f"given out {MAX_TRIES} times: the client c ")


def test_answers_to_the_tasks_of_others_are_stray_and_counted() -> None:
    tasks = dispatcher()
    honest, liar = tasks.join("honest", window=1), tasks.join("liar", window=1)
    tickets = [tasks.submit("", until=60.0) for _ in range(2)]
    shares = given(tasks)
    for _ in range(MAX_STRAYS):
        assert tasks.answer(liar, shares[honest][0]) is Reception.STRAY
        assert not tasks.is_confused(liar)
    assert tasks.answer(liar, 12345) is Reception.STRAY
    assert tasks.is_confused(liar)
    assert tasks.answer(honest, shares[honest][0]) is Reception.TAKEN
    assert sorted(tickets) == sorted(share[0] for share in shares.values())


def test_nobody_comes() -> None:
    nobody = (
        "no client is attached here; if the run has several servers, a client attaches to each of them "
        "(every_address=True, or a list of addresses)"
    )
    tasks = dispatcher()
    tasks.submit("", until=3.0)
    assert [failure.message for failure in tasks.overdue(3.0)] == [nobody]
    tasks.join("late", window=1)
    assert given(tasks) == {}


def test_a_withdrawn_task_is_given_to_nobody_and_its_slot_is_freed_by_the_answer() -> None:
    tasks = dispatcher()
    client = tasks.join("c", window=1)
    first, second = (tasks.submit("", until=60.0) for _ in range(2))
    assert given(tasks) == {client: [first]}
    tasks.withdraw(first)
    assert given(tasks) == {}
    assert tasks.answer(client, first) is Reception.LATE
    assert given(tasks) == {client: [second]}


@pytest.mark.parametrize("seed", range(20))
def test_every_task_ends_once_whatever_happens(seed: int) -> None:
    rng = random.Random(seed)
    tasks = dispatcher()
    now, ended, open_tickets = 0.0, [], set()
    clients: dict[int, set[int]] = {}
    for _ in range(600):
        now += rng.random() * 3
        match rng.choice(["submit", "submit", "submit", "join", "leave", "answer", "answer", "wait"]):
            case "submit":
                open_tickets.add(tasks.submit(rng.choice(["a", "b"]), until=now + 30))
            case "join":
                sources = rng.choice([frozenset(), frozenset({"a"}), frozenset({"b"})])
                clients[tasks.join("c", window=rng.randint(1, 3), sources=sources)] = set()
            case "leave" if clients:
                client = rng.choice(list(clients))
                ended += [failure.ticket for failure in tasks.leave(client)]
                del clients[client]
            case "answer" if any(clients.values()):
                client = rng.choice([client for client, tickets in clients.items() if tickets])
                ticket = clients[client].pop()
                if tasks.answer(client, ticket) is Reception.TAKEN:
                    ended.append(ticket)
            case "wait":
                ended += [failure.ticket for failure in tasks.overdue(now)]
        for assignment in tasks.assign(now):
            assert assignment.ticket not in ended
            clients[assignment.client].add(assignment.ticket)
    for _ in range(200):
        now += 10
        ended += [failure.ticket for failure in tasks.overdue(now)]
    assert sorted(ended) == sorted(open_tickets)
