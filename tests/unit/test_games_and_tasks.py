"""Adapters to textarena, reasoning-gym and NeMo-Gym, against stubs of what they offer.

tests/deploy/test_environment_packages.py has the packages themselves.
"""

from __future__ import annotations

import enum
import http.server
import importlib
import json
import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.core.errors import ConfigError
from paceline.core.samples.chat import Message, ToolCall
from paceline.sdk import Outcome
from paceline.sdk.adapters import nemo_gym_environment, nemo_gym_rows, textarena_environment


def says(text: str, *calls: tuple[str, dict[str, object]]) -> Message:
    made = (ToolCall(call_id=f"c{i}", name=n, arguments=a) for i, (n, a) in enumerate(calls))
    return Message(role="assistant", content=text, tool_calls=tuple(made))


class Kind(enum.Enum):
    PLAYER_ACTION = 1
    GAME_MESSAGE = 2


class Count:
    """A game of `textarena`: players add up to ten; who says it wins. Raw: only what is new is observed."""

    def __init__(self, *, raw: bool = True) -> None:
        self.raw = raw

    def reset(self, num_players: int, seed: int) -> None:
        self.players, self.turn, self.total, self.seed = num_players, 0, seed, seed
        self.log: list[list[tuple[int, str, Kind]]] = [[] for _ in range(num_players)]
        self.all: list[str] = [""] * num_players
        self._tell(-1, f"at {seed}", Kind.GAME_MESSAGE)

    def _tell(self, sender: int, text: str, kind: Kind) -> None:
        for player in range(self.players):
            self.log[player].append((sender, text, kind))
            self.all[player] += f"[{sender}] {text}\n"

    def get_observation(self) -> tuple[int, Any]:
        new, self.log[self.turn] = self.log[self.turn], []
        return self.turn, new if self.raw else self.all[self.turn]

    def step(self, action: str) -> tuple[bool, dict[str, Any]]:
        self._tell(self.turn, action, Kind.PLAYER_ACTION)
        self.total += int(action)
        self._tell(-1, f"at {self.total}", Kind.GAME_MESSAGE)
        self.last, self.turn = self.turn, (self.turn + 1) % self.players
        return self.total >= 10, {}

    def close(self) -> tuple[Any, dict[int, dict[str, Any]]]:
        done = self.total >= 10
        rewards = {p: 1 if p == self.last else -1 for p in range(self.players)} if done else None
        return rewards, {p: {"turn_count": 2, "invalid_move": False} for p in range(self.players)}


async def played(make: Any, *said: str, **options: Any) -> tuple[list[str], list[str], Outcome]:
    environment = textarena_environment(make, **options)()
    opened = await environment.open({}, task_seed=3, episode_seed=9)
    seen = [await environment.step(says(text)) for text in said]
    outcome = await environment.close("")
    return [opened.text, *(one.text for one in seen)], [one.done for one in seen], outcome


async def test_a_game_of_one_player() -> None:
    texts, done, outcome = await played(Count, "1", "6")
    assert (texts, done) == (["at 3", "at 4", ""], ["", "game_over"])
    assert (outcome.reward, outcome.components) == (1.0, {"turn_count": 2.0, "invalid_move": 0.0})
    assert (await played(Count, "1"))[2].reward == 0.0


async def test_a_game_that_repeats_itself_is_read_once() -> None:
    texts, _, _ = await played(lambda: Count(raw=False), "1", "2")
    assert texts == ["[-1] at 3", "[0] 1\n[-1] at 4", "[0] 2\n[-1] at 6"]


async def test_an_opponent_moves_first_and_may_end_the_game() -> None:
    asked: list[tuple[int, str]] = []

    def opponent(who: int, text: str) -> str:
        asked.append((who, text))
        return "4"

    texts, done, outcome = await played(Count, "1", num_players=2, player=1, opponent=opponent)
    assert asked == [(0, "at 3"), (0, "at 7\n1\nat 8")]
    assert texts == ["at 3\n4\nat 7", ""]
    assert (done, outcome.reward) == (["game_over"], -1.0)
    with pytest.raises(ValueError, match="needs `opponent`"):
        textarena_environment(Count, num_players=2)


@pytest.fixture
def reasoning(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The adapter over a stub of the library."""
    library = types.ModuleType("reasoning_gym")

    def create_dataset(name: str, *, size: int, seed: int, **settings: Any) -> list[dict[str, Any]]:
        place = {"place": (1, 2)} if name == "tuples" else settings
        made = [{"question": f"{seed}+{i}?", "answer": str(seed + i), "metadata": place} for i in range(size)]
        return [*made[:-1], made[-1] | {"answer": None}] if name == "open" else made

    def get_score_answer_fn(name: str) -> Any:
        def score(answer: str | None, entry: dict[str, Any]) -> float:
            is_kept = name != "tuples" or entry["metadata"]["place"] == (1, 2)
            return 0.25 * float(answer is not None) + 0.75 * float(answer == entry["answer"] and is_kept)

        return score

    library.create_dataset = create_dataset  # type: ignore[attr-defined]
    library.get_score_answer_fn = get_score_answer_fn  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "reasoning_gym", library)
    name = "paceline.sdk.adapters.reasoning_gym"
    monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module(name)
    sys.modules.pop(name, None)


def test_tasks_of_reasoning_gym_are_rows_and_their_reward(
    reasoning: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    reasoning.main(["sums", "--size", "2", "--seed", "4"])
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert first["prompt"] == [{"role": "user", "content": "4+0?"}]
    assert (second["ground_truth"], second["data_source"]) == ("5", "sums")
    graded = {"data_source": "sums", "entry": second["entry"]}
    for response, reward in (
        ("<answer>3</answer> no, <answer>\n5 </answer>", 1.0),
        ("<answer>5</answer> no, <answer>3</answer>", 0.25),
        ("5", 0.0),
    ):
        assert reasoning.score(response, "5", prompt="", **graded) == reward
    assert reasoning.score(" 5\n", "5", tag="", **graded) == 1.0
    [row] = reasoning.rows("sums", size=1, seed=1, level=3)
    assert json.loads(row["entry"])["metadata"] == {"level": 3}
    assert [row["ground_truth"] for row in reasoning.rows("open", size=2, seed=1)] == ["1", ""]
    with pytest.raises(ConfigError, match="the entries of tuples are more than JSON can hold"):
        list(reasoning.rows("tuples", size=1, seed=1))


class Resources(http.server.BaseHTTPRequestHandler):
    """A resources server of NeMo-Gym: it knows an episode by its cookie."""

    got: list[tuple[str, str, Any]]
    verdict: dict[str, Any]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.got.append((self.path, self.headers.get("Cookie", ""), body))
        status, answer = 200, {}
        if self.path == "/verify":
            status, answer = (500, {}) if not self.verdict else (200, self.verdict)
        elif self.path != "/seed_session":
            status, answer = (200, {"cold": True}) if self.path == "/weather" else (422, {"detail": "no"})
        self.send_response(status)
        if self.path == "/seed_session":
            self.send_header("Set-Cookie", "session=e1; Path=/")
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def resources(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(Resources, "got", [], raising=False)
    monkeypatch.setattr(Resources, "verdict", {"reward": 0.5, "reward_components": {"a": 1.0}}, raising=False)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Resources) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/"
        server.shutdown()


TOOLS = [
    {"type": "function", "name": name, "parameters": {"type": "object", "properties": {"city": {}}}}
    for name in ("weather", "broken")
]
ROW = {
    "responses_create_params": {
        "input": [{"role": "developer", "content": "Help."}, {"role": "user", "content": "SF?"}],
        "tools": [*TOOLS, {"type": "web_search"}],
    },
    "expected": 3,
}


async def test_a_resources_server_of_nemo_gym(resources: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(ROW) + "\n" + json.dumps({"responses_create_params": {"input": "Hi."}}))
    row, plain = nemo_gym_rows(file)
    assert row["prompt"] == [{"role": "system", "content": "Help."}, {"role": "user", "content": "SF?"}]
    assert plain["prompt"] == [{"role": "user", "content": "Hi."}]

    environment = nemo_gym_environment(resources)()
    await environment.open({"request": row["request"]}, task_seed=0, episode_seed=0)
    assert list(environment.tools) == ["weather", "broken"]
    said = await environment.step(says("", ("weather", {"city": "SF"}), ("broken", {})))
    assert [message.content for message in said.messages] == ['{"cold": true}', '{"detail": "no"}']
    assert (said.done, (await environment.step(says("Cold."))).done) == ("", "answered")
    outcome = await environment.close("answered")
    assert (outcome.reward, outcome.components) == (0.5, {"a": 1.0})

    paths, cookies, bodies = zip(*Resources.got, strict=True)
    assert paths == ("/seed_session", "/weather", "/broken", "/verify")
    assert cookies == ("", *["session=e1"] * 3)
    assert (bodies[0], bodies[1], bodies[3]["expected"]) == (ROW, {"city": "SF"}, 3)
    output = bodies[3]["response"]["output"]
    assert [(item["type"], item.get("call_id")) for item in output] == [
        ("function_call", "c0"),
        ("function_call", "c1"),
        ("function_call_output", "c0"),
        ("function_call_output", "c1"),
        ("message", None),
    ]
    assert (output[0]["arguments"], output[2]["output"]) == ('{"city": "SF"}', '{"cold": true}')
    assert output[4]["content"][0]["text"] == "Cold."


async def test_what_nemo_gym_does_not_grade_loses_the_attempt(
    resources: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    environment = nemo_gym_environment(resources)()
    with pytest.raises(ValueError, match=r"data\.extra_keys: \[request\]"):
        await environment.open({}, task_seed=0, episode_seed=0)
    await environment.open({"request": json.dumps(ROW)}, task_seed=0, episode_seed=0)
    for verdict, said in (
        ({"reward": 0.0, "mask_sample": True, "failure_reason": "no judge"}, "does not count: no judge"),
        ({}, "/verify: HTTP Error 500"),
    ):
        monkeypatch.setattr(Resources, "verdict", verdict)
        with pytest.raises(RuntimeError, match=said):
            await environment.close("answered")
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"responses_create_params": {"input": [{"type": "function_call"}]}}))
    with pytest.raises(ConfigError, match="prompts are messages of text"):
        list(nemo_gym_rows(file))
