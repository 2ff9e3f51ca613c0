"""Shows the first rows as a run sees them: the model's prompt, and the rewards of the ground truths."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from paceline.config.run import RunConfig
from paceline.core.errors import ConfigError
from paceline.core.scoring import ScoreItem
from paceline.data.hub import local_files
from paceline.data.prompts import PromptSet, Tokenizer, last_message
from paceline.data.rows import Row, first_rows, value_at
from paceline.reward.functions.pool import FunctionPool, function_specs
from paceline.reward.functions.spec import FunctionSpec
from paceline.reward.scoring.scores import Score

_SHOWN = 400
# Number of first rows whose ground truths are scored.
_NUM_SCORED = 8


def first_prompt(prompts: PromptSet, tokenizer: Tokenizer, image_token_id: int | None = None) -> str:
    """Returns the first prompt with special tokens, shortened if long; an image is one token in it."""
    prompt = next(iter(prompts.prompts.values()))
    ids = prompt.token_ids.tolist()
    shown = [
        token
        for token, before in zip(ids, [None, *ids[:-1]], strict=True)
        if token != before or token != image_token_id
    ]
    text = tokenizer.decode(shown, skip_special_tokens=False)
    return repr(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}...")


def example_reward(config: RunConfig, val_set: str = "") -> str:
    """Scores the first row's ground truth as if it were a response; "" if the row has none.

    The row is the first for training or, for `val_set`, the first of that set, which its own reward scores.

    Functions with `group: true` are left out, because there is only one response.

    A function may refuse a ground truth, because it may want more than the bare answer. If it refuses those
    of all first rows, that is an error: the run would end at its first step.

    Raises:
        DataError: the first file is unreadable.
        ConfigError: a function cannot be loaded, or fails on all of the first rows.
    """
    data, reward = config.data, config.rewards[val_set]
    files = data.val_sets[val_set].files if val_set else data.training_sets[0].files
    rows = first_rows(local_files(files[:1], "val" if val_set else "train")[0], _NUM_SCORED)
    functions = [function for function in function_specs(reward) if not function.shape.group]
    items = [item for row in rows if (item := _item(config, row, val_set)) is not None]
    if not functions or not items:
        return ""
    scores = asyncio.run(_score(functions, items, reward.timeout_s))
    errors = [score.error for score in scores if score.error is not None]
    if len(errors) == len(scores):
        raise ConfigError(
            f"the reward functions failed on the ground truth of each of the first {len(scores)} rows, the "
            f"first time with {errors[0][0].value}: {errors[0][1]}; correct the function, or the columns "
            "that it gets"
        )
    return f"the first row's ground truth as a response: {_words(functions, scores[0])}"


def _item(config: RunConfig, row: Row, val_set: str) -> ScoreItem | None:
    """Returns the row's ground truth as a response to its prompt; None if either is missing."""
    data = config.data
    prompt, truth = value_at(row, data.prompt_key), value_at(row, data.ground_truth_key)
    if not isinstance(prompt, str | list) or not prompt or truth is None:
        return None
    source = value_at(row, data.data_source_key) if data.data_source_key else None
    return ScoreItem(
        trajectory_id="example",
        prompt=last_message(prompt),
        response=str(truth),
        ground_truth=str(truth),
        data_source="" if source is None else str(source),
        extra={key: value_at(row, key) for key in data.extra_keys},
        val_set=val_set,
    )


async def _score(
    functions: Sequence[FunctionSpec], items: Sequence[ScoreItem], timeout_s: float
) -> Sequence[Score]:
    async with FunctionPool(functions, num_processes=1, timeout_s=timeout_s) as pool:
        return await pool.score(items)


def _words(functions: Sequence[FunctionSpec], score: Score) -> str:
    if score.error is not None:
        return f"{score.error[0].value}: {score.error[1]}"
    values = ", ".join(f"{name} {value:g}" for name, value in score.components.items())
    wants_more = any(score.components.get(function.name) == 0 for function in functions)
    doubt = "; 0 is right only if the function wants more than the bare answer"
    return values + doubt if wants_more else values
