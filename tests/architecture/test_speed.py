"""No test depends on how fast the machine is: nothing in them has to happen within less than a minute.

A deadline costs nothing when what it waits for comes, so it is generous. A pause shows that something does
not happen, so an assertion follows, or it stands in PAUSES with what it is for.
"""

from __future__ import annotations

import ast
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

from support import source

LEAST_S = 60.0
PAUSE_S = 0.1
HANGS_S = 10.0
"""A pause of so much stands for what hangs, and is broken off."""

_WAITS = {"result", "exception", "join", "wait", "acquire", "communicate"}
_CALLS = {"run", "urlopen", "create_connection", "HTTPConnection", "HTTPSConnection"}

_LOOKS = "a look between others, under a deadline"
_PLAYS_SLOW = "plays something that is slow or away"
_LEADS = "brings about the more demanding order; what is asserted holds in the other one, too"
_SHOWS = "shows that something does not happen, which is asserted later"
_AT_LEAST = "so much time has to have passed; more does no harm"
PAUSES = {
    "contract/test_broker:test_waiting_readers_leave_room_for_other_commands": _LEADS,
    "contract/test_redis_outages:test_a_reader_waits_through_a_restart": _LEADS,
    "integration/test_reward_process:feed_until_it_scores": _LOOKS,
    "integration/test_rollout_engine:late": _PLAYS_SLOW,
    "support/compose_stack:exit_code": _LOOKS,
    "support/compose_stack:wait_for": _LOOKS,
    "support/hosts_run:wait_for_phase": _LOOKS,
    "support/prometheus_server:prometheus_server": _LOOKS,
    "support/prometheus_server:wait_for": _LOOKS,
    "support/reward_functions:_double_fork": _PLAYS_SLOW,
    "support/reward_servers:Score": _PLAYS_SLOW,
    "support/training_run:wait_until_nothing_is_left": _LOOKS,
    "unit/test_align:replace": _PLAYS_SLOW,
    "unit/test_api:press": _LEADS,
    "unit/test_episode_groups:test_conversations_that_do_not_fit_the_kv_cache_wait_in_order": _SHOWS,
    "unit/test_episodes:test_an_abandoned_call_leaves_a_process_for_the_next": _LEADS,
    "unit/test_half_drawn:test_a_group_of_another_owner_is_not_saved_over": _SHOWS,
    "unit/test_lost_in_a_push:test_it_is_asked_only_now_and_then": _AT_LEAST,
    "unit/test_lost_in_a_push:test_the_ranks_of_the_epoch_hear_of_it_and_no_others": _AT_LEAST,
    "unit/test_reward_consumer:test_a_service_that_leaves_scores_what_it_has_and_takes_no_more": _AT_LEAST,
    "unit/test_reward_group_clients:slow": _PLAYS_SLOW,
    "unit/test_reward_pool:test_a_cancelled_call_leaves_the_pool_usable": _LEADS,
    "unit/test_reward_pool:test_close_ends_waiting_calls_and_leaves_no_process": _LEADS,
    "unit/test_reward_remote:test_a_service_that_comes_back_is_found_again": _PLAYS_SLOW,
    "unit/test_reward_description:test_calls_that_begin_at_once_ask_once_what_the_service_is": _SHOWS,
    "unit/test_rollout_server:test_an_absent_broker_is_waited_for_and_does_not_hold_up_a_push": _LEADS,
    "unit/test_service_link:test_a_controller_that_is_away_longer_than_the_dead_is_waited_for": _AT_LEAST,
    "unit/test_turns:train_later": _LEADS,
}
SHORT = {
    "unit/test_forked:test_a_program_that_takes_too_long_is_killed": "the program stands still for longer",
    **{
        f"unit/test_watchdog:test_{name}": "its seconds are those of a clock that the test sets"
        for name in (
            "a_kind_of_which_no_member_has_registered_is_named_before_those_that_are_ready",
            "a_phase_that_took_long_before_is_given_twice_that",
            "every_trajectory_is_progress",
            "while_members_start_those_that_are_not_ready_are_named",
            "who_is_waited_for_is_named_after_half_a_minute_and_then_every_minute",
        )
    },
}


def _number(node: ast.expr | None) -> float | None:
    """The value of a literal number."""
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return float(node.value)  # type: ignore[arg-type]
    return None


def _bound(call: ast.Call) -> float | None:
    """The seconds that a call gives what it waits for; None where it gives none, or no literal number."""
    function = ast.unparse(call.func)
    name = function.rpartition(".")[2]
    named = _number(next((word.value for word in call.keywords if word.arg == "timeout"), None))
    first, second = (*map(_number, call.args[:2]), None, None)[:2]
    if function == "asyncio.timeout":
        return first
    if function == "asyncio.wait_for":
        return second if named is None else named
    if name in _WAITS and isinstance(call.func, ast.Attribute):
        return first if named is None and len(call.args) == 1 else named
    return named if name in _CALLS else None


class _Speeds(ast.NodeVisitor):
    """Collects the functions that pause without an assertion afterwards, or wait for a short time."""

    def __init__(self) -> None:
        self.pauses: set[str] = set()
        self.short: set[str] = set()
        self._names: list[str] = []
        self._asserted: set[ast.AST] = set()
        self._broken_off = 0

    def visit(self, node: ast.AST) -> None:
        """Notes the statements that an assertion follows, on the way."""
        for field in ("body", "orelse", "finalbody"):
            block = getattr(node, field, None)
            if isinstance(block, list):
                for statement, following in pairwise(block):
                    if isinstance(following, ast.Assert):
                        self._asserted.update(ast.walk(statement))
        super().visit(node)

    def _visit_scope(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self._names.append(node.name)
        self.generic_visit(node)
        self._names.pop()

    visit_FunctionDef = visit_AsyncFunctionDef = _visit_scope

    def _visit_with(self, node: ast.With | ast.AsyncWith) -> None:
        broken_off = any("raises(TimeoutError" in ast.unparse(item) for item in node.items)
        self._broken_off += broken_off
        self.generic_visit(node)
        self._broken_off -= broken_off

    visit_With = visit_AsyncWith = _visit_with

    def visit_Call(self, node: ast.Call) -> None:
        """A pause, or a wait."""
        where = self._names[-1] if self._names else ""
        if ast.unparse(node.func) in ("time.sleep", "asyncio.sleep"):
            seconds = _number(node.args[0])
            if seconds is not None and PAUSE_S <= seconds < HANGS_S and node not in self._asserted:
                self.pauses.add(where)
        bound = _bound(node)
        if bound is not None and bound < LEAST_S and not self._broken_off:
            self.short.add(where)
        self.generic_visit(node)


@cache
def _speeds() -> tuple[tuple[str, _Speeds], ...]:
    """The functions of every file of tests, by its name."""
    tests, speeds = source.ROOT / "tests", []
    for path in sorted(tests.rglob("*.py")):
        folder = path.relative_to(tests).parts[0]
        if folder not in ("chaos", "deploy"):
            visitor = _Speeds()
            visitor.visit(source.tree(path))
            speeds.append((str(Path(folder) / path.stem), visitor))
    return tuple(speeds)


def test_what_happens_is_waited_for_with_a_generous_deadline() -> None:
    short = {f"{name}:{function}" for name, visitor in _speeds() for function in visitor.short}
    assert short == SHORT.keys(), f"give it {LEAST_S:g} s or more, or say in SHORT why it cannot fail"


def test_a_pause_shows_that_something_does_not_happen() -> None:
    pauses = {f"{name}:{function}" for name, visitor in _speeds() for function in visitor.pauses}
    assert pauses == PAUSES.keys(), "wait for an event or a condition, or say in PAUSES what it is for"


@pytest.mark.parametrize(
    ("text", "pauses", "short"),
    [
        ("await asyncio.sleep(0.1)\nf()", {"g"}, set()),
        ("await asyncio.sleep(0.1)\nassert not f()", set(), set()),
        ("while f():\n    time.sleep(0.2)\nassert f()", set(), set()),
        ("time.sleep(0.05); time.sleep(60)", set(), set()),
        ("async with asyncio.timeout(30), f():\n    pass", set(), {"g"}),
        ("async with asyncio.timeout(60):\n    pass", set(), set()),
        ("with pytest.raises(TimeoutError):\n    await asyncio.wait_for(f(), 0.2)", set(), set()),
        ("await asyncio.wait_for(f(), 30)", set(), {"g"}),
        ("f.result(30); f.wait(timeout=5)", set(), {"g"}),
        ("','.join(f); f.wait(60.0); subprocess.run(f, timeout=300)", set(), set()),
        ("subprocess.run(f, timeout=9)", set(), {"g"}),
    ],
)
def test_it_knows_what_depends_on_speed(text: str, pauses: set[str], short: set[str]) -> None:
    visitor = _Speeds()
    body = "\n".join(f"    {line}" for line in text.splitlines())
    visitor.visit(ast.parse(f"async def g():\n{body}"))
    assert (visitor.pauses, visitor.short) == (pauses, short)
