"""The built-in reward functions against numbers that could be wrong."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.reward.builtin import exact_match, gsm8k, math_verify
from paceline.reward.builtin.grade_school import extract_answer

GSM8K = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "gsm8k"


@pytest.mark.parametrize(("split", "method"), [("train", "strict"), ("test", "strict"), ("test", "flexible")])
def test_gsm8k_scores_every_answer_of_the_data_set_right_and_each_changed_answer_wrong(
    split: str, method: str
) -> None:
    path = GSM8K / f"{split}.jsonl"
    if not path.exists():
        pytest.skip(f"GSM8K is not there: {path}")
    answers = [json.loads(line)["answer"] for line in path.read_text().splitlines()]
    assert len(answers) == {"train": 7473, "test": 1319}[split]
    for answer in answers:
        # Read without the module under test: the number as the data set writes it.
        written = answer.rsplit("####", 1)[1].strip()
        bare = written.replace(",", "")
        assert extract_answer(answer) == bare
        for ground_truth in (answer, written, bare):
            assert gsm8k(answer, ground_truth, method=method) == 1.0, answer
        last_digit_changed = re.sub(r"\d$", lambda digit: str((int(digit[0]) + 1) % 10), answer)
        for changed in (str(int(bare) + 1), str(-int(bare) or 7), f"1{bare}", f"{bare}.5", f"{written}1"):
            response = f"{answer.rsplit('####', 1)[0]}#### {changed}"
            assert gsm8k(response, answer, method=method) == 0.0, response
        assert gsm8k(last_digit_changed, answer, method=method) == 0.0
        assert gsm8k(answer, last_digit_changed, method=method) == 0.0


@pytest.mark.parametrize(
    ("response", "ground_truth", "score"),
    [
        ("#### 18", "18", 1.0),
        ("####18", "18", 1.0),
        ("#### 18.", "18", 1.0),
        ("#### 18.00", "18", 1.0),
        ("#### 018", "18", 1.0),
        ("#### $18", "18", 1.0),
        ("#### $ 18", "$18", 1.0),
        ("#### -$18", "-18", 1.0),
        ("#### $-18", "-18", 1.0),
        ("#### \u221218", "-18", 1.0),
        ("#### +18", "18", 1.0),
        ("#### -18", "18", 0.0),
        ("#### 1,234.50", "1234.5", 1.0),
        ("#### 1234.5", "1,234.50", 1.0),
        ("#### .5", "0.5", 1.0),
        ("#### 18 apples", "18", 1.0),
        ("#### 18, which is it", "18", 1.0),
        ("#### 18%", "18", 1.0),
        ("#### 1,23", "1", 0.0),
        ("#### 1,23", "123", 0.0),
        ("#### 1,2001", "1200", 0.0),
        ("#### 1.2.3", "1.2", 0.0),
        ("#### 18/2", "18", 0.0),
        ("#### 18e3", "18", 0.0),
        ("#### 180", "18", 0.0),
        ("#### eighteen", "18", 0.0),
        ("#### ", "18", 0.0),
        ("", "18", 0.0),
        ("The answer is 18.", "18", 0.0),
        ("### 18", "18", 0.0),
        ("#### 18\n#### 19", "18", 0.0),
        ("#### 19\n#### 18\n", "18", 1.0),
        ("18 #### 19", "18", 0.0),
        ("#### " + "1" * 200_000, "18", 0.0),
    ],
)
def test_gsm8k_strict(response: str, ground_truth: str, score: float) -> None:
    assert gsm8k(response, ground_truth, prompt="p", data_source="gsm8k", level=3) == score


@pytest.mark.parametrize(
    ("response", "ground_truth", "score"),
    [
        ("The answer is 18.", "18", 1.0),
        ("She has 3 + 15 = 18 eggs", "#### 18", 1.0),
        ("It costs $1,234.50!", "1234.5", 1.0),
        ("so x = -18", "-18", 1.0),
        ("20-18", "18", 1.0),
        ("(20)-18", "18", 1.0),
        ("a loss of -$18", "-18", 1.0),
        ("$-18", "-18", 1.0),
        ("\\boxed{18}", "18", 1.0),
        ("18 of 20", "18", 0.0),
        ("it is 1/2", "2", 0.0),
        ("version 1.2.3", "3", 0.0),
        ("none", "18", 0.0),
    ],
)
def test_gsm8k_flexible(response: str, ground_truth: str, score: float) -> None:
    assert gsm8k(response, ground_truth, method="flexible") == score


@pytest.mark.parametrize("ground_truth", ["", "eighteen", "#### ", "18 apples", "1,23", "18 19"])
def test_gsm8k_refuses_a_ground_truth_without_a_number(ground_truth: str) -> None:
    with pytest.raises(ValueError, match="needs a number"):
        gsm8k("#### 18", ground_truth)


def test_gsm8k_names_its_methods() -> None:
    with pytest.raises(ValueError, match='method="strict" and method="flexible"'):
        gsm8k("#### 18", "18", method="loose")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("response", "ground_truth", "ignore_case", "score"),
    [
        (" 42\n", "42", False, 1.0),
        ("042", "42", False, 0.0),
        ("4 2", "42", False, 0.0),
        ("Yes", "yes", False, 0.0),
        ("STRASSE", "straße", True, 1.0),
    ],
)
def test_exact_match(response: str, ground_truth: str, ignore_case: bool, score: float) -> None:
    assert exact_match(response, ground_truth, ignore_case=ignore_case, prompt="p") == score


@pytest.mark.parametrize(
    ("response", "ground_truth", "score"),
    [
        ("Thus $\\frac{2}{4}$.", "1/2", 1.0),
        ("The answer is \\boxed{0.5}", "\\frac{1}{2}", 1.0),
        ("\\boxed{(x+1)^2}", "x^2+2x+1", 1.0),
        ("\\boxed{2\\sqrt{3}}", "$\\sqrt{12}$", 1.0),
        ("\\boxed{\\{2,1\\}}", "\\{1,2\\}", 1.0),
        ("\\boxed{x^2+2x+2}", "x^2+2x+1", 0.0),
        ("the answer is 7", "72", 0.0),
        ("I do not know", "72", 0.0),
        ("", "72", 0.0),
    ],
)
def test_math_verify(response: str, ground_truth: str, score: float) -> None:
    assert math_verify(response, ground_truth, prompt="p") == score


def test_math_verify_tells_undecided_from_wrong() -> None:
    tower = "$9^{9^{9^{9}}}$"
    with pytest.raises(TimeoutError, match="within 1 s"):
        math_verify(tower, "2", timeout_s=1)
    assert math_verify(tower, "2", timeout_s=1, timeout_reward=-0.5) == -0.5


def test_math_verify_refuses_an_empty_ground_truth() -> None:
    with pytest.raises(ValueError, match="no expression in the ground truth"):
        math_verify("\\boxed{1}", " ")


def test_importing_the_built_ins_loads_nothing_heavy() -> None:
    code = (
        "import sys; from paceline.reward.builtin import exact_match, gsm8k, math_verify;"
        "import paceline.reward.functions.child;"
        "print([name for name in ('torch', 'grpc', 'math_verify', 'sympy', 'redis') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300
    )
    assert done.stdout.strip() == "[]"
