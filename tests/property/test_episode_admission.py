"""Admission of conversations over any sequence of events: in order, never too many, and all can end."""

from __future__ import annotations

import asyncio
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.rollout.episodes.admission import AdmissionControl, Ledger

CAPACITY = 100
events = st.lists(
    st.tuples(st.sampled_from(["ask", "grow", "leave"]), st.integers(1, 120), st.integers(0, 9))
)


@settings(max_examples=300, deadline=None)
@given(events)
def test_the_room_keeps_its_order_and_its_size_and_never_locks(sequence: list[Any]) -> None:
    ledger, asked, entered, inside = Ledger(CAPACITY), 0, list[int](), dict[int, int]()
    needs: dict[int, int] = {}
    gone: set[int] = set()

    def admitted(keys: list[int]) -> None:
        for key in keys:
            # Who has given up is in the line no more.
            assert key not in gone
            # Nobody enters a room in which it does not fit, unless it is empty.
            assert not inside or sum(inside.values()) + needs[key] <= CAPACITY
            inside[key] = needs[key]
            entered.append(key)

    for name, number, chosen in sequence:
        keys = sorted(inside)
        if name == "ask":
            needs[asked] = number
            admitted(ledger.ask(asked, number))
            asked += 1
        elif name == "grow" and keys:
            key = keys[chosen % len(keys)]
            inside[key] = max(inside[key], number)
            admitted(ledger.grow(key, inside[key]))
        elif name == "leave" and asked:
            key = chosen % asked  # one that is in, one that waits, or one that has gone
            inside.pop(key, None)
            gone.add(key)
            admitted(ledger.leave(key))
        assert ledger.num_tokens == sum(inside.values())
        assert entered == sorted(entered)
        if ledger.num_waiting:
            assert inside
    # However long they have become: each can end, and the next ones enter then.
    while inside:
        key = min(inside)
        del inside[key]
        admitted(ledger.leave(key))
    assert ledger.num_waiting == 0
    assert set(entered) | gone == set(range(asked))


async def test_a_conversation_that_gives_up_while_it_waits_lets_the_next_one_in() -> None:
    """In the line it would keep all others out of a server that has room for them."""
    control, may_end, entered = AdmissionControl(CAPACITY), asyncio.Event(), list[str]()

    async def converse(name: str, num_tokens: int) -> None:
        async with control.entered(num_tokens):
            entered.append(name)
            await may_end.wait()

    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        group.create_task(converse("first", 80))
        waiting = group.create_task(converse("too long", 80))
        group.create_task(converse("short", 20))
        await asyncio.sleep(0)
        assert (entered, control.is_full) == (["first"], True)
        waiting.cancel()
        await asyncio.wait([waiting])
        await asyncio.sleep(0)
        assert (entered, control.is_full) == (["first", "short"], False)
        may_end.set()
