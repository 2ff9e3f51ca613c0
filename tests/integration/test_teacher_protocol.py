"""What a teacher is asked and answers, by the classes of the installed vLLM's completions endpoint."""

from __future__ import annotations

import json
from typing import Any

import pytest

from paceline.config.training.teacher import TeacherConfig
from paceline.reward.teacher.client import TeacherClient
from support.fake_teacher import FakeTeacher, serving

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]


async def test_bodies_and_answers_are_those_of_vllms_own_classes() -> None:
    pytest.importorskip("vllm")
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest, CompletionResponse

    fake, checked = FakeTeacher(lambda text: []), []

    def through_vllm(tree: dict[str, Any]) -> None:
        """Reads and writes the answer as vLLM's server does; -inf is written as -9999."""
        entry = tree["choices"][0]["prompt_logprobs"][1]
        entry["49"] = {"logprob": -9999.0, "rank": 50, "decoded_token": None}
        answer = CompletionResponse.model_validate(tree)
        checked.append(json.loads(answer.model_dump_json()))
        tree.clear()
        tree.update(checked[-1])

    fake.spoil = through_vllm
    async with serving(fake) as port:
        config = TeacherConfig(address=f"http://127.0.0.1:{port}/v1", model="big", top_k=3)
        client = TeacherClient(config)
        top_k = await client.top_k([5, 6, 7], [1, 2])
        await client.close()
    request = CompletionRequest.model_validate(fake.completions[0])
    parameters = request.to_sampling_params(request.max_tokens, {})
    assert (request.prompt, parameters.prompt_logprobs, parameters.max_tokens) == ([5, 6, 7], 3, 1)
    first = checked[0]["choices"][0]["prompt_logprobs"][1]
    assert set(first) > set(map(str, top_k.token_ids[0].tolist()))
    assert top_k.log_probs[0].tolist() == sorted((p["logprob"] for p in first.values()), reverse=True)[:3]
