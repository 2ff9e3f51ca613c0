"""OpenAI's Responses form at the agents' address: the unchanged client, the tokens of chat completions."""

from __future__ import annotations

import json
from typing import Any

import pytest

from paceline.core.samples.trajectory import sampled_spans
from paceline.rollout.episodes.agents.completions import RefusedRequestError
from paceline.rollout.episodes.agents.responses import chat_body
from paceline.sdk import Outcome
from support.driving import ADD, calculate, client, play
from support.episodes import END, Script, call, ids

TOOL = {"type": "function", **ADD["function"], "strict": False}
MADE = call("add", '{"a": 1, "b": 2}')


async def respond(task: Any, *, base_url: str, token: str, model: str) -> Outcome:
    """The loop of `calculate`, in the other form."""
    items: list[Any] = [*task["messages"]]
    async with client(base_url, token) as api:
        while True:
            answer = await api.responses.create(model=model, input=items, tools=[TOOL])
            items += [item.model_dump(exclude_none=True) for item in answer.output]
            made = [item for item in answer.output if item.type == "function_call"]
            if not made:
                return Outcome(reward=float(answer.output_text == "It is 3"))
            for asked in made:
                result = str(sum(json.loads(asked.arguments).values()))
                items.append({"type": "function_call_output", "call_id": asked.call_id, "output": result})


async def test_its_tokens_are_those_of_chat_completions() -> None:
    engine = Script(MADE, "It is 3")
    [drawn], [other] = await play(respond, engine), await play(calculate, Script(MADE, "It is 3"))
    assert drawn.token_ids.tolist() == other.token_ids.tolist()
    assert [drawn.token_ids[a:b].tolist() for a, b in sampled_spans(drawn.mask)] == [
        [*ids(MADE), END],
        [*ids("It is 3"), END],
    ]
    assert drawn.segment_starts == ()
    assert drawn.episode is not None
    assert (drawn.episode.reward, drawn.episode.num_tool_calls) == (1.0, 1)


async def test_a_stream_says_the_same() -> None:
    said = "Let me see. " * 20

    async def streaming(task: Any, *, base_url: str, token: str, model: str) -> float:
        async with (
            client(base_url, token) as api,
            api.responses.stream(model=model, input="1+2?", tools=[TOOL]) as stream,
        ):
            events = [event async for event in stream]
            final = await stream.get_final_response()
        text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
        assert text == final.output_text == said.strip()
        assert [item.type for item in final.output] == ["message", "function_call"]
        assert json.loads(final.output[1].arguments) == {"a": 1, "b": 2}
        assert [event.sequence_number for event in events][-1] > 4
        assert final.usage is not None
        return float(final.usage.output_tokens)

    [drawn] = await play(streaming, Script(f"{said}\n{MADE}"))
    assert drawn.episode is not None
    assert drawn.episode.reward == len(drawn.token_ids)


async def test_settings_limits_and_refusals_are_those_of_chat_completions() -> None:
    from openai import BadRequestError

    async def demanding(task: Any, *, base_url: str, token: str, model: str) -> None:
        async with client(base_url, token) as api:
            raw = await api.responses.with_raw_response.create(
                model="gpt-9", instructions="Be brief.", input="x", temperature=0.1, max_output_tokens=2
            )
            assert raw.headers["x-paceline-ignored"] == "model, temperature"
            cut = raw.parse()
            assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
            for refused in (
                {"previous_response_id": "resp_1"},
                {"text": {"format": {"type": "json_object"}}},
                {"tools": [{"type": "web_search"}]},
                {"tool_choice": "required"},
                {"input": [{"type": "reasoning", "summary": [], "id": "r"}]},
                {"input": []},
            ):
                with pytest.raises(BadRequestError):
                    await api.responses.create(**{"model": model, "input": "x", **refused})

    engine = Script("the answer is long")
    [drawn] = await play(demanding, engine)
    assert len(engine.requests) == 1
    assert engine.requests[0].sampling.max_tokens == len(drawn.token_ids) == 2


def test_an_answers_items_become_one_message() -> None:
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "1+2?"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "So"}]},
        {"type": "function_call", "call_id": "a", "name": "add", "arguments": "{}"},
        {"type": "function_call", "call_id": "b", "name": "add", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": "3"},
    ]
    user, assistant, tool = chat_body({"input": items})["messages"]
    assert (user["role"], assistant["role"], tool["role"]) == ("user", "assistant", "tool")
    assert [made["id"] for made in assistant["tool_calls"]] == ["a", "b"]
    assert tool == {"role": "tool", "tool_call_id": "a", "content": "3"}
    with pytest.raises(RefusedRequestError, match="a function_call or its output, not 'reasoning'"):
        chat_body({"input": [{"type": "reasoning"}]})
