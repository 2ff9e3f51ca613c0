"""A training step that the user's own algorithm carries out: its numbers, and the orders that are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.core.errors import ConfigError
from paceline.learner.distributed.ranks import Ranks
from paceline.learner.train.algorithm import try_algorithm
from paceline.learner.train.state.learner import Learner
from support.learner_fakes import run_config
from support.learner_scenarios import numbers, take_step, weight_sums

pytestmark = pytest.mark.torch

PAGE = Path(__file__).resolve().parents[2] / "docs" / "add-an-algorithm.md"
HEAD = """
from paceline.algorithms import advantages
from paceline.algorithms.algorithm import Algorithm
class Own(Algorithm):
    needs = ("critic",)
    def advantages(self, rows):
        return advantages.vapo(rows)
    def step(self, s):
"""
CRITIC: dict[str, Any] = {"adv_estimator": "gae", "use_kl_in_reward": False, "kl_ctrl": {"type": "fixed"}}


def own(folder: Path, *lines: str, **keys: Any) -> dict[str, Any]:
    """The section of an algorithm whose step has these lines."""
    file = folder / "own.py"
    file.write_text(HEAD + "".join(f"        {line}\n" for line in lines))
    return {**CRITIC, "type": "custom", "path": f"{file}:Own", "needs": ("critic",), **keys}


def two_steps(model: Path, ranks: Ranks, algorithm: dict[str, Any], **critic: Any) -> list[Any]:
    """Metrics and weights of two steps."""
    learner = Learner.build(run_config(model, algorithm=algorithm, critic=critic), ranks)
    steps = [numbers(take_step(learner, step)) for step in (1, 2)]
    # An own algorithm is scored whole, so the ratio of its first mini-batch is measured in every step.
    kept = [{n: v for n, v in step.items() if not n.startswith("actor/first_")} for step in steps]
    return [kept, weight_sums(learner)]


def test_a_step_of_the_same_verbs_gives_the_numbers_of_the_built_in_one_to_the_bit(
    model: Path, ranks: Ranks, tmp_path: Path
) -> None:
    steps, weights = two_steps(model, ranks, {**CRITIC, "adv_estimator": "vapo"})
    verbs = (
        "s.score()",
        "s.estimate(self.advantages)",
        "s.update('policy', self.loss)",
        "s.update('critic')",
    )
    algorithm = own(tmp_path, *verbs)
    assert two_steps(model, ranks, algorithm) == [steps, weights]
    assert steps[1]["critic/grad_norm"] > 0


def test_the_pages_step_is_that_of_vapo_with_its_lambdas_to_the_bit(
    model: Path, ranks: Ranks, tmp_path: Path
) -> None:
    page = PAGE.read_text(encoding="utf-8")
    code = next(part for part in page.split("```python\n") if "class Decoupled(" in part).split("```")[0]
    (tmp_path / "decoupled.py").write_text(code)
    theirs = {**CRITIC, "type": "custom", "path": f"{tmp_path}/decoupled.py:Decoupled", "needs": ("critic",)}
    built_in = {**CRITIC, "adv_estimator": "vapo", "lam_policy": 0.95, "lam_critic": 1.0}
    (own_steps, own_weights), (steps, weights) = (two_steps(model, ranks, a) for a in (theirs, built_in))
    assert own_weights == weights
    names = [name for name in steps[0] if name.startswith(("actor/", "critic/vf_loss", "critic/grad_norm"))]
    assert len(names) > 8
    for taken, expected in zip(own_steps, steps, strict=True):
        assert {name: taken[name] for name in names} == {name: expected[name] for name in names}
    coupled = {**built_in, "lam_critic": 0.95}
    assert two_steps(model, ranks, coupled)[1] != weights  # through the values of the second step


def test_in_the_warm_up_of_the_critic_an_own_step_leaves_the_policy_as_it_is(
    model: Path, ranks: Ranks, tmp_path: Path
) -> None:
    verbs = (
        "s.score()",
        "s.estimate(self.advantages)",
        "s.update('critic')",
        "s.update('policy', self.loss)",
    )
    algorithm = own(tmp_path, *verbs)
    learner = Learner.build(run_config(model, algorithm=algorithm, critic={"warmup": 1}), ranks)
    before = weight_sums(learner)
    first = take_step(learner, 1).metrics
    assert weight_sums(learner) == before
    assert "actor/grad_norm" not in first
    assert first["critic/grad_norm"] > 0
    assert take_step(learner, 2).metrics["actor/grad_norm"] > 0


SCORED = "s.score(); s.estimate(self.advantages)"
FORM = "write s.score(), s.estimate(self.advantages), s.update(network, loss), in this order"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("pass", "its step never updates the policy"),
        (SCORED, "never updates the policy"),
        (f"{SCORED}; s.update('policy', self.loss)", "never updates the critic"),
        ("s.update('policy', self.loss)", "updates the policy before it has estimated advantages"),
        ("s.score(); s.update('critic')", "updates the critic before it has estimated advantages"),
        ("s.estimate(self.advantages)", "estimates before it has scored the samples"),
        ("s.score(); s.score()", "scores the samples twice"),
        (f"{SCORED}; s.update('critic'); s.update('critic')", "updates the critic twice"),
        (
            f"{SCORED}; s.update('policy', self.loss); s.estimate(self.advantages)",
            "estimates after the policy's update",
        ),
        (f"{SCORED}; s.update('policy')", "updates the policy without a loss"),
        (f"{SCORED}; s.update('critic', self.loss)", "gives the critic a loss, but the critic has its own"),
        (f"{SCORED}; s.update('actor', self.loss)", "updates 'actor', but the run trains policy and critic"),
        ("1 / 0", r"its step raised ZeroDivisionError: .*own\.py, line 9\)"),
        ("s.train()", r"its step raised AttributeError: .*own\.py, line 9\)"),
    ],
)
def test_a_step_that_is_none_is_one_sentence_before_the_run(tmp_path: Path, line: str, said: str) -> None:
    algorithm = own(tmp_path, line)
    with pytest.raises(ConfigError, match=said) as caught:
        try_algorithm(run_config(Path("m"), algorithm=algorithm))
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(f"algorithm '{tmp_path}/own.py:Own'")
    assert FORM in str(caught.value)


def test_what_a_step_hands_to_its_verbs_is_tried_before_the_run(tmp_path: Path) -> None:
    scores = "s.score(); s.estimate(lambda rows: rows.scores); s.update('policy', self.loss)"
    with pytest.raises(ConfigError, match="returned Tensor; return Estimates"):
        try_algorithm(run_config(Path("m"), algorithm=own(tmp_path, scores)))
    (tmp_path / "other").mkdir()  # a path is imported once
    loss = f"{SCORED}; s.update('policy', lambda inputs: inputs.log_probs)"
    with pytest.raises(ConfigError, match="returned Tensor; return LossOutputs"):
        try_algorithm(run_config(Path("m"), algorithm=own(tmp_path / "other", loss)))


def test_a_step_that_goes_wrong_later_is_refused_in_the_step_and_a_failure_cannot_be_hidden(
    model: Path, ranks: Ranks, tmp_path: Path
) -> None:
    """The file is tried when the learner is built; what it does in a step may depend on anything."""
    flag = tmp_path / "flag"
    lines = (
        "import pathlib",
        f"word = pathlib.Path({str(flag)!r}).read_text()",
        "if word == 'never': return",
        "s.score()",
        "try: s.estimate(self.advantages if word == 'well' else lambda rows: rows.scores)",
        "except Exception: pass",
        "s.update('critic'); s.update('policy', self.loss)",
    )
    algorithm = own(tmp_path, *lines)
    flag.write_text("well")
    learner = Learner.build(run_config(model, algorithm=algorithm), ranks)
    before = weight_sums(learner)
    for word, said in (
        ("never", "never updates the policy"),
        ("hidden", "returned Tensor; return Estimates"),
    ):
        flag.write_text(word)
        with pytest.raises(ConfigError, match=said):
            take_step(learner, 1)
        assert learner.version == 0
    assert weight_sums(learner) == before
    flag.write_text("well")
    assert take_step(learner, 1).metrics["actor/grad_norm"] > 0
