"""What an evaluation says of answers: numbers worked by hand, and an interval that covers what it should."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from paceline.cli.commands.start.eval import table
from paceline.core.samples.evaluation import (
    EvaluatedAnswer,
    evaluate,
    final_answer,
    gain,
    majority_at_k,
    pass_at_k,
)


def answer(
    prompt: int, reward: float | None, final: str = "4", *, tokens: int = 2, cut: bool = False
) -> EvaluatedAnswer:
    return EvaluatedAnswer(prompt=prompt, reward=reward, final=final, num_tokens=tokens, is_cut=cut)


@pytest.mark.parametrize(
    ("n", "right", "k"), [(5, 2, 1), (5, 2, 3), (6, 0, 2), (6, 6, 6), (7, 1, 7), (4, 3, 2)]
)
def test_pass_at_k_is_the_share_of_all_choices(n: int, right: int, k: int) -> None:
    choices = list(itertools.combinations([True] * right + [False] * (n - right), k))
    assert pass_at_k(n, right, k) == pytest.approx(sum(map(any, choices)) / len(choices))


def test_votes() -> None:
    right = [True, True, False, False, False]
    assert majority_at_k(["4", "4", "5", "6", "7"], right, 5) == 1.0
    assert majority_at_k(["4", "4", "5", "5", "7"], right, 5) == 0.5, "a tie counts its mean"
    assert majority_at_k(["", "", "5", "5", "7"], right, 5) == 0.0, "no answer takes no part"
    assert majority_at_k([""], [True], 1) == 0.0
    assert majority_at_k(["4", "5", "5"], [True, False, False], 1) == pytest.approx(1 / 3, abs=0.08)
    # Of the four choices of three, two have both 4s, and two have one answer of each kind.
    without = majority_at_k(["4", "4", "5", "6"], [True, True, False, False], 3)
    assert without == pytest.approx((1 + 1 + 1 / 3 + 1 / 3) / 4, abs=0.05)
    assert majority_at_k(["4", "5", "5"], [True, False, False], 2) == majority_at_k(
        ["4", "5", "5"], [True, False, False], 2
    )


@pytest.mark.parametrize(
    ("text", "final"),
    [
        (r"so \boxed{\frac{1}{2}} and 7", r"\frac{1}{2}"),
        ("#### 1,200\nand 3", "1200"),
        ("12 + 30 = 42.", "42"),
        ("-3.5 it is", "-3.5"),
        ("nothing", ""),
    ],
)
def test_final_answers(text: str, final: str) -> None:
    assert final_answer(text) == final


def test_a_set_is_measured_prompt_by_prompt() -> None:
    answers = [
        *(answer(3, reward, text) for reward, text in ((1.0, "4"), (1.0, "4"), (0.0, "5"), (0.5, "6"))),
        *(answer(9, 0.0, text, tokens=6, cut=True) for text in ("1", "1", "2", "3")),
        answer(9, None),
    ]
    result = evaluate(answers, num_asked=5, right_above=0.6)
    assert (result.num_prompts, result.num_missing, result.num_samples) == (2, 3, 4)
    assert (result.reward.value, result.right.value) == (2.5 / 8, 0.25)
    assert list(result.pass_at) == [1, 2, 4]
    assert result.pass_at[2].value == pytest.approx((1 - 1 / 6) / 2)
    assert result.pass_at[4].value == 0.5
    assert {k: estimate.value for k, estimate in result.majority_at.items()} == {4: 0.5}
    assert (result.length.value, result.cut.value) == (4.0, 0.5)
    assert (result.right.low, result.right.high) == (0.0, 0.5), "both prompts are drawn alike"
    assert "0.250 [0.000, 0.500]" in table({"sums": result})
    with pytest.raises(ValueError, match="no answer was scored"):
        evaluate([answer(1, None)], num_asked=1)


def test_a_gain_is_counted_prompt_by_prompt() -> None:
    """Every second prompt is easy. One answer in eight more is right, in each prompt alike."""
    rights = [(1, 2) if prompt % 2 else (6, 7) for prompt in range(40)]
    before, after = (
        [answer(prompt, float(n < right[when])) for prompt, right in enumerate(rights) for n in range(8)]
        for when in (0, 1)
    )
    grown = gain(before, after)
    assert grown is not None
    assert (grown.value, grown.low, grown.high) == pytest.approx((0.125, 0.125, 0.125))
    shares = [evaluate(answers, num_asked=40).right for answers in (before, after)]
    assert shares[0].high > shares[1].low
    lost = gain(after, before)
    assert lost is not None
    assert lost.value == pytest.approx(-0.125)
    # Only prompts that both answered count, and an answer without a score is none.
    some = gain([answer(0, 0.5), answer(1, 0.0), answer(2, None)], [answer(0, 1.0), answer(2, 1.0)])
    assert some is not None
    assert some.value == 0.0
    assert gain([answer(0, 0.5)], [answer(0, 1.0)], right_above=0.6).value == 1.0  # type: ignore[union-attr]
    assert gain([answer(0, 1.0)], [answer(1, 1.0)]) is None


def test_intervals_cover_the_mean_about_as_often_as_they_say() -> None:
    generator = np.random.default_rng(3)
    covered = 0
    for _ in range(60):
        values = generator.random(50) < 0.3
        right = evaluate([answer(n, float(value)) for n, value in enumerate(values)], num_asked=50).right
        covered += right.low <= 0.3 <= right.high
    assert 50 <= covered <= 60
