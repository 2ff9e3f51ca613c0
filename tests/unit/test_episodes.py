"""Episodes over a scripted engine: tokens, turns, seeds, what ends them, what begins them again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from paceline.core.errors import ConfigError, InvalidMessageError, NumericsError, PeerLostError
from paceline.core.samples.chat import Message, ToolCall, ToolSpec
from paceline.core.samples.trajectory import FinishReason, sampled_spans
from paceline.rollout.episodes.environment import EnvironmentLostError, Opening
from paceline.rollout.episodes.loop import Slot, turn_seed
from paceline.rollout.episodes.recorder import Draw
from paceline.rollout.episodes.tools import calls
from paceline.rollout.episodes.tools.tool_pool import ToolPool
from paceline.service.children.process import ChildProcess
from support.chat_templates import TEMPLATES
from support.episodes import END, Echo, Script, call, episodes, group, ids, text

TOOLS = "support.tools"
LOST = EnvironmentLostError("gone", peer="environment")


class Slots:
    """How many slots are in use, and the most that ever were."""

    def __init__(self) -> None:
        self.used, self.events = 0, []  # type: ignore[var-annotated]

    def __call__(self) -> Slot:
        slots = self

        class Counted(Slot):
            def pause(self) -> None:
                slots.events.append("pause")

            def resume(self) -> None:
                slots.events.append("resume")

            def end(self) -> None:
                slots.events.append("end")

        return Counted()


async def draw(
    engine: Any, environment: Any, *, samples: int = 1, slots: Any = None, **changes: Any
) -> list[Draw]:
    async with asyncio.timeout(120):
        return await episodes(engine, environment, **changes).draw(
            group(samples=samples), "0", slots or Slots()
        )


@asynccontextmanager
async def tools(*names: str, call_s: float = 5.0, memory_mib: int = 2048) -> AsyncIterator[ToolPool]:
    pool = ToolPool(
        [f"{TOOLS}:{name}" for name in names],
        call_s=call_s,
        memory_bytes=memory_mib * 2**20,
        num_processes=1,
    )
    try:
        await pool.start()
        yield pool
    finally:
        await pool.close()


async def test_a_conversation_with_a_tool_token_by_token() -> None:
    engine = Script(call("add", '{"a": 1, "b": 2}'), "It is 3")
    async with tools("add") as pool:
        [drawn] = await draw(engine, pool)
    first, second = [*ids(call("add", '{"a": 1, "b": 2}')), END], [*ids("It is 3"), END]
    assert [drawn.token_ids[a:b].tolist() for a, b in sampled_spans(drawn.mask)] == [first, second]
    between = drawn.token_ids[len(first) : -len(second)].tolist()
    assert text(between) == (
        "\n<|im_start|>user\n<tool_response>\n3\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    assert drawn.log_probs.tolist() == [-0.5] * len(first) + [0.0] * len(between) + [-0.5] * len(second)
    assert drawn.prompt_token_ids.tolist() == group().prompt_token_ids.tolist()
    assert drawn.episode is not None
    assert (drawn.episode.stop_reason, drawn.episode.num_turns, drawn.episode.num_tool_calls) == (
        "answered",
        2,
        1,
    )
    assert (drawn.episode.reward, drawn.finish_reason) == (None, FinishReason.STOP)
    # What the engine saw in the second turn is what is trained on.
    assert engine.requests[1].prompt_token_ids == [*drawn.prompt_token_ids.tolist(), *first, *between]


async def test_seeds_room_and_policy_of_each_turn() -> None:
    engine = Script("a", "b", "c")
    [drawn] = await draw(engine, Echo(num_steps=3), max_response_tokens=120)
    first, _, third = engine.requests
    assert [r.seed for r in engine.requests] == [100, turn_seed(100, 2), turn_seed(100, 3)]
    assert len({r.seed for r in engine.requests}) == 3
    assert first.sampling.max_tokens == 120
    used = len(third.prompt_token_ids) - len(first.prompt_token_ids)
    assert third.sampling.max_tokens == 120 - used
    assert {r.cache_salt for r in engine.requests} == {str(group().policy)}
    assert len({r.request_id for r in engine.requests}) == 3
    assert drawn.episode is not None
    assert (drawn.episode.reward, drawn.episode.components) == (2.0, {"turns": 1.0})


async def test_a_single_turn_is_the_plain_request() -> None:
    """The same tokens, seed and limits as without an environment: the metrics are the same, then."""
    engine = Script("3")
    [drawn] = await draw(engine, Echo(num_steps=1))
    plain = group()
    request = engine.requests[0]
    assert list(request.prompt_token_ids) == plain.prompt_token_ids.tolist()
    assert (request.sampling, request.seed) == (plain.sampling, plain.seeds[0])
    assert drawn.token_ids.tolist() == [*ids("3"), END]
    assert drawn.mask.tolist() == [1] * len(drawn.token_ids)


async def test_the_engine_is_free_while_a_tool_works() -> None:
    slots = Slots()
    await draw(Script("a"), Echo(num_steps=2), slots=slots)
    assert slots.events == [*("pause", "resume") * 4, "end"]  # open, step, step, close


@pytest.mark.parametrize(
    ("lines", "changes", "reason", "turns"),
    [
        ((call("again"),), {"max_turns": 3}, "max_turns", 3),
        (("the " * 50,), {"max_turn_tokens": 6}, "max_turn_tokens", 1),
        (("the " * 50,), {"max_response_tokens": 30}, "max_response_tokens", 1),
        (("the the", "the " * 50), {"max_sampled_tokens": 12}, "max_sampled_tokens", 2),
        ((call("a") + call("b"),), {"max_tool_calls": 3}, "max_tool_calls", 2),
        ((call("a"),), {"max_tool_calls": 2}, "max_tool_calls", 3),
        (("a",), {"max_response_tokens": 25}, "max_response_tokens", 1),
    ],
)
async def test_what_the_policy_reaches_ends_its_episode(
    lines: tuple[str, ...], changes: dict[str, int], reason: str, turns: int
) -> None:
    echo = Echo(num_steps=99)
    [drawn] = await draw(Script(*lines), echo, **changes)
    assert drawn.episode is not None
    assert (drawn.episode.stop_reason, drawn.episode.num_turns) == (reason, turns)
    assert drawn.mask[-1] == 1, "nothing that the environment said comes last"
    assert len(drawn.token_ids) <= changes.get("max_response_tokens", 1000)
    assert echo.events[-1] == ("close", reason)


async def test_an_episode_ends_as_its_last_answer_did() -> None:
    [cut] = await draw(Script("the the", "the " * 50), Echo(num_steps=9), max_sampled_tokens=12)
    [ended] = await draw(Script("the the"), Echo(num_steps=9), max_turns=2)
    assert (cut.finish_reason, ended.finish_reason) == (FinishReason.LENGTH, FinishReason.STOP)


async def test_a_lost_environment_begins_the_episode_again_from_its_start() -> None:
    echo, engine = Echo(num_steps=2, losses=[LOST]), Script("a", "b")
    [drawn] = await draw(engine, echo)
    opened = [task for kind, task in echo.events if kind == "open"]
    assert [kind for kind, _ in echo.events] == ["open", "step", "abandon", "open", "step", "step", "close"]
    assert opened[0].attempt < opened[1].attempt
    assert (opened[0].task_seed, opened[0].episode_seed) == (opened[1].task_seed, opened[1].episode_seed)
    assert [r.seed for r in engine.requests] == [100, 100, turn_seed(100, 2)]
    assert text(drawn.token_ids).count("<|im_start|>") == 2, "nothing of the first attempt is in it"


async def test_a_server_that_starts_again_has_the_higher_attempts() -> None:
    """Else an environment would refuse it for as long as the lease of the attempt before lasts."""
    attempts = []
    for _ in range(2):  # each `draw` is a server of its own
        echo = Echo(num_steps=1, losses=[LOST])
        await draw(Script("a"), echo)
        attempts += [task.attempt for kind, task in echo.events if kind == "open"]
    assert attempts == sorted(set(attempts))
    assert len(attempts) == 4


async def test_attempts_are_bounded() -> None:
    echo = Echo(losses=[LOST] * 9)
    with pytest.raises(EnvironmentLostError, match="gone"):
        await draw(Script("a"), echo, retries=1)
    assert [kind for kind, _ in echo.events] == ["open", "step", "abandon"] * 2


async def test_the_others_of_a_group_are_abandoned_with_the_first_error() -> None:
    echo = Echo(num_steps=3)
    with pytest.raises(InvalidMessageError, match="refused"):
        await draw(Script("a", InvalidMessageError("refused", reason="r")), echo, samples=3)
    kinds = [kind for kind, _ in echo.events]
    assert kinds.count("open") == kinds.count("abandon") == 3


async def test_unusable_log_probs_leave_no_episode() -> None:
    engine = Script("a")
    engine.log_prob = float("nan")
    with pytest.raises(NumericsError):
        await draw(engine, Echo())


async def test_what_an_environment_is_told() -> None:
    echo = Echo(num_steps=1)
    await draw(Script("a"), echo, samples=2)
    first, second = [task for kind, task in echo.events if kind == "open"]
    assert first.task == {
        "messages": [{"role": "user", "content": "What is 1 + 2?"}],
        "ground_truth": "3",
        "data_source": "",
        "level": 2,
    }
    assert (first.run_id, first.trajectory_id) == ("r", "train:1:7:0")
    assert first.task_seed == second.task_seed
    assert (first.episode_seed, second.episode_seed) == (100, 101)


async def test_an_opening_message_is_part_of_the_prompt() -> None:
    hello = Opening(messages=(Message(role="user", content="Guess<|im_end|>"),))
    [drawn] = await draw(Script("a"), Echo(num_steps=1, opening=hello))
    prompt = text(drawn.prompt_token_ids)
    assert prompt.endswith("user\nGuess< |im_end|><|im_end|>\n<|im_start|>assistant\n")
    long = Opening(messages=(Message(role="user", content="the " * 45),) * 8)
    with pytest.raises(InvalidMessageError, match="max_prompt_length"):
        await draw(Script("a"), Echo(num_steps=1, opening=long))


@pytest.mark.parametrize(
    ("written", "name", "arguments", "problem"),
    [
        (call("add", '{"a": 1}'), "add", {"a": 1}, ""),
        ('<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', "add", {"a": 1}, ""),
        ('<tool_call>{"name": "add", "parameters": {"a": 1}}', "add", {"a": 1}, ""),
        ('<tool_call>[{"name": "add"}]</tool_call>', "add", {}, ""),
        ("<tool_call>add(1, 2)</tool_call>", "", {}, "not JSON"),
        ("<tool_call>" + "[" * 100_000, "", {}, "not JSON"),
        ("<tool_call>[1]</tool_call>", "", {}, "no JSON object"),
        ('<tool_call>{"arguments": {}}</tool_call>', "", {}, 'no "name"'),
        (call("add", "[1]"), "add", {}, "no JSON object"),
    ],
)
def test_calls_are_read_or_have_a_problem(
    written: str, name: str, arguments: dict[str, Any], problem: str
) -> None:
    action = calls.read_action(f"Well. {written}", "tagged", 3)
    [read] = action.tool_calls
    assert (read.call_id, read.name, read.arguments) == ("call_3_0", name, arguments)
    assert problem in read.problem
    assert bool(read.problem) is bool(problem)


def test_formats_of_calls() -> None:
    bare = '{"name": "add", "parameters": {"a": 1}}'
    assert calls.read_action(bare, "json", 1).tool_calls[0].arguments == {"a": 1}
    assert calls.read_action(f"I say {bare}", "json", 1).tool_calls == ()
    assert calls.read_action(bare, "tagged", 1).tool_calls == ()
    assert len(calls.read_action(call("a") + call("b"), "tagged", 1).tool_calls) == 2
    with pytest.raises(ConfigError, match="auto, tagged, json, xml, glm"):
        calls.check_format("yaml")


ADD = ToolSpec(
    name="add",
    description="",
    parameters={
        "properties": {
            "a": {"type": "integer"},
            "text": {"type": "string"},
            "maybe": {"type": ["string", "null"]},
            "yes": {"type": "boolean"},
            "numbers": {"type": "array"},
            "odd": "no schema",
        }
    },
)
TYPED = {"a": 12, "text": "12", "maybe": "3", "yes": True, "numbers": [1, 2], "odd": 4, "other": "x + 1"}
WRITTEN = {"a": "12", "text": "12", "maybe": "3", "yes": "True", "numbers": "[1, 2]", "odd": "4"}
WRITTEN["other"] = "x + 1"
XML = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in WRITTEN.items())
GLM = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in WRITTEN.items())


@pytest.mark.parametrize(
    ("call_format", "written", "problem"),
    [
        ("xml", f"<tool_call>\n<function=add>\n{XML}</function>\n</tool_call>", ""),
        ("xml", f"<tool_call><function=add>{XML.replace(chr(10), '')}</function></tool_call>", ""),
        ("glm", f"<tool_call>add\n{GLM}</tool_call>", ""),
        ("glm", f"<tool_call>add{GLM.replace(chr(10), '')}", ""),
        ("xml", '<tool_call>{"name": "add"}</tool_call>', "it is not <function=NAME>...</function>"),
        ("xml", "<tool_call><function=add><parameter=a>1</parameter>", "it is not <function=NAME>"),
        ("xml", "<tool_call><function=add><parameter=a>1</function></tool_call>", "from '<parameter=a>1' on"),
        ("xml", "<tool_call><function=add>1, 2</function></tool_call>", "from '1, 2' on"),
        ("glm", "<tool_call><arg_key>a</arg_key></tool_call>", "it does not begin with a tool's name"),
        ("glm", "<tool_call>add<arg_key>a</arg_key></tool_call>", "from '<arg_key>a</arg_key>' on"),
    ],
)
def test_calls_in_tags_have_the_types_of_the_schema(call_format: str, written: str, problem: str) -> None:
    [read] = calls.read_action(f"Well. {written}", call_format, 1, [ADD]).tool_calls
    assert problem in read.problem
    assert bool(read.problem) is bool(problem)
    if not problem:
        assert (read.name, read.arguments) == ("add", TYPED)
        assert calls.without_calls(f"Well. {written}", call_format) == "Well."


@pytest.mark.parametrize("call_format", calls.FORMATS)
def test_a_call_is_read_as_it_was_written(call_format: str) -> None:
    arguments = {"a": 12, "text": " two\nlines ", "yes": False, "numbers": [1]}
    written = calls.write_call("add", arguments, call_format)
    assert [read.arguments for read in calls.read_action(written, call_format, 1, [ADD]).tool_calls] == [
        arguments
    ]
    [read] = calls.read_action(calls.write_call("add", {}, call_format), call_format, 1).tool_calls
    assert (read.name, read.arguments, read.problem) == ("add", {}, "")


@pytest.mark.parametrize("call_format", ["xml", "glm"])
async def test_a_tool_gets_numbers_and_words_as_its_annotations_say(call_format: str) -> None:
    written = [calls.write_call("add", {"a": 1, "b": 2}, call_format)]
    written.append(calls.write_call("quote", {"word": "12"}, call_format))
    async with tools("add", "quote") as pool:
        [drawn] = await draw(Script("\n".join(written), "so"), pool, call_format=call_format)
    said = text(drawn.token_ids.tolist())
    assert "<tool_response>\n3\n</tool_response>" in said
    assert "<tool_response>\n'12'\n</tool_response>" in said


def test_a_long_call_in_tags_is_refused_at_once() -> None:
    """The time of an expression that goes back for each tag would grow with the square of the length."""
    for call_format, written in (
        ("xml", "<tool_call><function=a>" + "<parameter=b>1" * 100_000 + "</function>"),
        ("glm", "<tool_call>a" + "<arg_key>b</arg_key><arg_value>" * 100_000),
    ):
        [read] = calls.read_action(written, call_format, 1).tool_calls
        assert "cannot be read" in read.problem


def test_the_format_of_calls_is_that_of_the_template() -> None:
    formats = {family: calls.format_of(template) for family, (template, _) in TEMPLATES.items()}
    assert formats == {
        "qwen2.5": "tagged",
        "qwen3": "tagged",
        "qwen3.5": "xml",
        "glm4.5": "glm",
        "llama3": "json",
        "smollm2": "tagged",
        "gemma": "tagged",
    }


async def said(pool: ToolPool, call: ToolCall) -> str:
    text, seconds = await pool.call(call)
    assert 0.0 <= seconds < 10.0
    return text


def wanted(name: str, **arguments: object) -> ToolCall:
    return ToolCall(call_id="c", name=name, arguments=arguments)


async def test_what_tools_answer() -> None:
    async with tools("add", "fall", "flood", "scramble", "chatter") as pool:
        assert await said(pool, wanted("add", a=2, b=3)) == "5"
        assert await said(pool, wanted("add", a=2, c=3)) == "error: add has no argument 'c'; it has a, b"
        assert await said(pool, wanted("add")) == "error: add needs the argument 'a'; it has a, b"
        assert (await said(pool, wanted("add", a="x", b=1))).startswith("error: TypeError")
        assert await said(pool, wanted("fall")) == "error: ValueError: no such thing"
        assert "there is no tool 'subtract'; there are add" in await said(pool, wanted("subtract"))
        assert "cannot be passed on: a value of type int" in await said(pool, wanted("add", a=2**70))
        assert len(await said(pool, wanted("flood"))) == 1_000_000
        assert await said(pool, wanted("scramble")) == "ab\\udcff\\udcfe"
        assert await said(pool, wanted("chatter")) == "quiet"


async def test_a_tool_that_hangs_dies_or_hoards_harms_no_other() -> None:
    async with tools("add", "hang", "die", "hoard", call_s=4.0) as pool:
        assert await said(pool, wanted("hang")) == "error: the tool did not answer within 4 s"
        assert "ended: exit code 3" in await said(pool, wanted("die"))
        assert "ended: out of memory" in await said(pool, wanted("hoard"))
        assert await said(pool, wanted("add", a=1)) == "1"


async def test_an_abandoned_call_leaves_a_process_for_the_next() -> None:
    async with tools("add", "hang", call_s=60.0) as pool:
        hanging = asyncio.create_task(said(pool, wanted("hang")))
        await asyncio.sleep(0.2)
        hanging.cancel()
        await asyncio.wait([hanging])
        async with asyncio.timeout(120):
            assert await said(pool, wanted("add", a=1)) == "1"


@pytest.mark.parametrize(
    ("reference", "fault"),
    [
        ("add", "module:function"),
        ("support.tools:gone", "no 'gone'"),
        ("os:getpid", ""),
        ("os:path", "not a function"),
    ],
)
async def test_what_is_no_tool_is_refused(reference: str, fault: str) -> None:
    pool = ToolPool([reference], call_s=1.0, memory_bytes=2**31, num_processes=1)
    if not fault:
        await pool.start()
        assert pool.call_names == ["getpid"]
    else:
        with pytest.raises(ConfigError, match=fault):
            await pool.start()
    await pool.close()


@pytest.mark.parametrize("is_given_up", [False, True], ids=["refused", "given_up"])
async def test_a_tool_process_that_does_not_start_takes_no_place(
    is_given_up: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One place for a process: a call that lost it would be the last that is answered."""
    starting, start = asyncio.Event(), ChildProcess.start

    async def fails(*_: Any, **__: Any) -> Any:
        starting.set()
        if is_given_up:
            await asyncio.Event().wait()
        raise PeerLostError("no process", peer="tool process")

    add = ToolCall(call_id="c", name="add", arguments={"a": 1, "b": 2})
    async with tools("add", "die") as pool, asyncio.timeout(60):
        answer, _ = await pool.call(ToolCall(call_id="c", name="die", arguments={}))
        assert answer.startswith("error: the tool's process ended")
        monkeypatch.setattr(ChildProcess, "start", fails)
        asking = asyncio.create_task(pool.call(add))
        await starting.wait()
        if is_given_up:
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
        else:
            with pytest.raises(EnvironmentLostError, match="does not start"):
                await asking
        monkeypatch.setattr(ChildProcess, "start", start)
        assert (await pool.call(add))[0] == "3"


async def test_a_bad_observation_is_cut_and_made_safe() -> None:
    async with tools("flood") as pool:
        [drawn] = await draw(Script(call("flood"), "so"), pool)
    assert "[cut: 1000000 characters]" in text(drawn.token_ids)
    assert len(drawn.token_ids) < 200
    assert np.count_nonzero(drawn.mask) == len(ids(call("flood"))) + len(ids("so")) + 2
