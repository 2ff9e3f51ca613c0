"""The first row of the data in a run: the prompt that the model gets, the reward of its ground truth."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from paceline.config.run import RunConfig
from paceline.core.scoring import ScoreItem
from paceline.data.hub import local_files
from paceline.data.prompts import PromptSet, Tokenizer, last_message
from paceline.data.rows import first_row, value_at
from paceline.reward.functions.pool import FunctionPool, function_specs
from paceline.reward.functions.spec import FunctionSpec

_SHOWN = 400


def first_prompt(prompts: PromptSet, tokenizer: Tokenizer, image_token_id: int | None = None) -> str:
    """The first prompt, special tokens included, cut off where it is long; an image is one token in it."""
    prompt = next(iter(prompts.prompts.values()))
    ids = prompt.token_ids.tolist()
    shown = [
        token
        for token, before in zip(ids, [None, *ids[:-1]], strict=True)
        if token != before or token != image_token_id
    ]
    text = tokenizer.decode(shown, skip_special_tokens=False)
    return repr(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}...")


def example_reward(config: RunConfig) -> str:
    """What the reward functions give the first row's ground truth as a response; "" where it has none.

    Functions with `group: true` are left out, as there is one response.

    That they refuse it is no fault: they may want more in a response than the answer alone.

    Raises:
        DataError: the first file is unreadable.
        ConfigError: a function cannot be loaded.
    """
    data = config.data
    row = first_row(local_files(data.train_files[:1], "train")[0])
    prompt, truth = value_at(row, data.prompt_key), value_at(row, data.ground_truth_key)
    functions = [function for function in function_specs(config.reward) if not function.shape.group]
    if not functions or not prompt or truth is None:
        return ""
    source = value_at(row, data.data_source_key) if data.data_source_key else None
    item = ScoreItem(
        trajectory_id="example",
        prompt=last_message(prompt),
        response=str(truth),
        ground_truth=str(truth),
        data_source="" if source is None else str(source),
        extra={key: value_at(row, key) for key in data.extra_keys},
    )
    given = asyncio.run(_score(functions, item, config.reward.timeout_s))
    return f"the first row's ground truth as a response: {given}"


async def _score(functions: Sequence[FunctionSpec], item: ScoreItem, timeout_s: float) -> str:
    async with FunctionPool(functions, num_processes=1, timeout_s=timeout_s) as pool:
        (score,) = await pool.score([item])
    if score.error is not None:
        return f"{score.error[0].value}: {score.error[1]}"
    values = ", ".join(f"{name} {value:g}" for name, value in score.components.items())
    wants_more = any(score.components.get(function.name) == 0 for function in functions)
    doubt = "; 0 is right only if the function wants more than the bare answer"
    return values + doubt if wants_more else values
