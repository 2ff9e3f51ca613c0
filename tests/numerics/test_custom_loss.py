"""A loss, an estimator or an algorithm of the user's own: through the learner's step, and the errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.algorithms.policy_losses import LossInputs
from paceline.algorithms.rows import Estimates, SampleRows
from paceline.algorithms.users_own.own import checked_estimates
from paceline.core.errors import ConfigError
from paceline.learner.distributed.ranks import Ranks
from paceline.learner.train.algorithm import algorithm_of, try_algorithm
from paceline.learner.train.estimating import draw_rows
from paceline.learner.train.state.learner import Learner
from support.learner_fakes import make_batch, run_config
from support.learner_scenarios import numbers, take_step
from support.memory_faults import known_by_a_loss

pytestmark = pytest.mark.torch

HEAD = """
import torch
from paceline.algorithms.policy_losses import LossInputs, LossOutputs, ppo_clip
from paceline.algorithms.statistics import masked_mean
"""
# The page's own example, docs/add-an-algorithm.md.
PAGE = Path(__file__).resolve().parents[2] / "docs" / "add-an-algorithm.md"
SAME_AS_PPO_CLIP = """
def same(inputs: LossInputs, clip: float) -> LossOutputs:
    return ppo_clip(inputs, clip, clip, 3.0)
"""
READS_EVERYTHING = """
def reads(inputs: LossInputs) -> LossOutputs:
    ratio = (inputs.log_probs - inputs.old_log_probs).exp()
    away = inputs.old_log_probs - inputs.rollout_log_probs
    to_reference = inputs.log_probs - inputs.ref_log_probs
    loss = -inputs.scores[:, None] * ratio + 0.01 * to_reference
    return LossOutputs(loss, {"away": masked_mean(away.abs(), inputs.mask), "number": 2})
"""
GROUPS: dict[str, Any] = {
    "adv_estimator": "grpo",
    "use_kl_in_reward": False,
    "kl_ctrl": {"type": "fixed", "kl_coef": 0.1},
}


def write(folder: Path, text: str) -> Path:
    file = folder / "my_loss.py"
    file.write_text(HEAD + text)
    return file


def try_own(path: str, options: dict[str, float], **algorithm: Any) -> None:
    loss = {"type": "custom", "path": path, "options": options}
    try_algorithm(run_config(Path("m"), algorithm=GROUPS | algorithm, actor={"policy_loss": loss}))


def two_steps(model: Path, ranks: Ranks, **actor: Any) -> list[dict[str, float]]:
    learner = Learner.build(run_config(model, algorithm=GROUPS, actor=actor), ranks)
    return [numbers(take_step(learner, step)) for step in (1, 2)]


def test_a_custom_loss_equal_to_ppo_clip_gives_its_numbers_to_the_bit(
    tmp_path: Path, model: Path, ranks: Ranks
) -> None:
    loss = {"type": "custom", "path": f"{write(tmp_path, SAME_AS_PPO_CLIP)}:same", "options": {"clip": 0.01}}
    theirs = two_steps(model, ranks, policy_loss=loss, ppo_epochs=2)
    assert theirs == two_steps(model, ranks, clip_ratio=0.01, ppo_epochs=2)
    assert theirs[1]["actor/pg_clipfrac"] > 0


def test_its_own_metrics_and_what_it_may_read_reach_the_step(
    tmp_path: Path, model: Path, ranks: Ranks
) -> None:
    path = f"{write(tmp_path, READS_EVERYTHING)}:reads"
    actor = {"policy_loss": {"type": "custom", "path": path}, "use_kl_loss": True, "kl_loss_coef": 0.0}
    metrics = two_steps(model, ranks, **actor)[0]
    # The sampled log-probs of the made-up batch are far from the learner's.
    assert metrics["actor/away"] > 0.1
    assert metrics["actor/number"] == pytest.approx(2.0)
    # The guard's number is there without the loss's help.
    assert metrics["actor/first_ppo_kl"] == 0.0
    assert abs(metrics["actor/ppo_kl"]) > 1e-6
    assert metrics["actor/grad_norm"] > 0
    small = two_steps(model, ranks, **actor, ppo_max_token_len_per_gpu=24)[0]
    assert small["actor/away"] == pytest.approx(metrics["actor/away"], rel=1e-4)
    assert small["actor/pg_loss"] == pytest.approx(metrics["actor/pg_loss"], rel=1e-4)


@pytest.mark.parametrize(
    ("sections", "failing"),
    [
        ({}, set()),
        ({"actor": {"ppo_max_token_len_per_gpu": 24}}, set()),
        ({"actor": {"ppo_max_token_len_per_gpu": 96}}, {1}),
        ({"algorithm": {"resample": {"method": "pow"}}}, set()),
    ],
)
def test_a_loss_knows_the_group_and_the_values_of_each_sequence_however_a_batch_is_cut(
    model: Path, ranks: Ranks, sections: dict[str, Any], failing: set[int]
) -> None:
    metrics, learner = known_by_a_loss(ranks, str(model), failing, **sections)
    rows, _ = make_batch(step=1, seed=1)
    counts = [1] * len(rows)
    if "algorithm" in sections:
        scores, ids = [row.reward for row in rows], [row.trajectory_id.prompt_id for row in rows]
        drawn, _ = draw_rows(learner.config, scores=scores, group_ids=ids, step=1)
        assert drawn is not None
        counts = drawn.tolist()
    tokens = [count * row.num_sampled_tokens for count, row in zip(counts, rows, strict=True)]
    ids = sum(
        number * row.trajectory_id.prompt_id**2 for number, row in zip(tokens, rows, strict=True)
    ) / sum(tokens)
    assert metrics["actor/group"] == pytest.approx(ids, rel=1e-5)
    if "algorithm" not in sections:  # of the whole batch, each row once
        assert metrics["actor/value"] == pytest.approx(metrics["critic/values/mean"], rel=1e-4)
    assert ("guard/out_of_memory" in metrics) == bool(failing)


def test_a_loss_without_a_critic_has_no_values(tmp_path: Path) -> None:
    body = "def my_loss(inputs):\n    assert inputs.values is None\n    return LossOutputs(inputs.log_probs)"
    path = f"{write(tmp_path, body)}:my_loss"
    try_own(path, {})
    with pytest.raises(ConfigError, match="raised AssertionError"):
        try_own(path, {}, adv_estimator="gae")


def test_the_pages_loss_trains(tmp_path: Path, model: Path, ranks: Ranks) -> None:
    page = PAGE.read_text(encoding="utf-8")
    code = next(part for part in page.split("```python\n") if "def my_loss(" in part).split("```")[0]
    (tmp_path / "my_page_loss.py").write_text(code)
    loss = {"type": "custom", "path": f"{tmp_path}/my_page_loss.py:my_loss", "options": {"beta": 0.5}}
    metrics = two_steps(model, ranks, policy_loss=loss)[1]
    assert 0 <= metrics["actor/positive_share"] <= 1
    assert metrics["actor/grad_norm"] > 0


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("my_los = 1", r"has no 'my_loss'; its functions are"),
        ("my_loss = 1", r"is int, not a function: write my_loss\(inputs"),
        (
            "def my_loss(log_probs, advantages):\n    return log_probs",
            r"its call raised TypeError: my_loss\(\) missing .*; write my_loss\(inputs: LossInputs, ",
        ),
        (
            "def my_loss(inputs):\n    return inputs.log_probs",
            r"returned Tensor; return LossOutputs\(loss, metrics\)",
        ),
        (
            "def my_loss(inputs):\n    return LossOutputs(inputs.log_probs.mean())",
            r"returned a loss of \(\) torch.float32; return one number per token, .*, here \(3, 3\)",
        ),
        (
            "def my_loss(inputs):\n    return LossOutputs(inputs.log_probs.detach())",
            r"does not depend on inputs.log_probs: nothing would be learned",
        ),
        (
            "def my_loss(inputs):\n    return LossOutputs(inputs.log_probs / 0.0)",
            r"its loss is not finite on three sequences",
        ),
        (
            "def my_loss(inputs):\n    x = inputs.log_probs\n    return LossOutputs((x - x.data) ** 0.5)",
            r"its gradient is not finite",
        ),
        (
            "def my_loss(inputs):\n    return LossOutputs(inputs.log_probs, {'lr': 0.0})",
            r"a metric named 'lr'; choose another name than entropy, ",
        ),
        (
            "def my_loss(inputs):\n    return LossOutputs(inputs.log_probs, {'x': inputs.mask.sum(-1)})",
            r"reports 'x' as a tensor of shape \(3,\); report one number",
        ),
        (
            "def my_loss(inputs):\n    return LossOutputs(inputs.log_probs - inputs.ref_log_probs)",
            r"inputs.ref_log_probs is None; a loss that reads it needs actor.use_kl_loss=true",
        ),
        ("import nothing_of_the_kind", r"importing .*my_loss.py raised ModuleNotFoundError"),
    ],
)
def test_a_loss_that_cannot_be_trained_with_is_one_sentence(tmp_path: Path, body: str, said: str) -> None:
    path = f"{write(tmp_path, body)}:my_loss"
    with pytest.raises(ConfigError, match=said) as caught:
        try_own(path, {})
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(f"policy loss {path!r}")


def test_an_unknown_option_is_named(tmp_path: Path) -> None:
    path = f"{write(tmp_path, SAME_AS_PPO_CLIP)}:same"
    with pytest.raises(ConfigError, match="unexpected keyword argument 'clipp'"):
        try_own(path, {"clipp": 0.1})


def test_names_of_metrics_that_change_from_call_to_call(tmp_path: Path, model: Path, ranks: Ranks) -> None:
    body = "def my_loss(inputs):\n    return LossOutputs(inputs.log_probs, {f'rows_{len(inputs.mask)}': 1.0})"
    path = f"{write(tmp_path, body)}:my_loss"
    with pytest.raises(ConfigError, match="return the same names at every call"):
        two_steps(model, ranks, policy_loss={"type": "custom", "path": path})


ALGORITHMS = """
import torch
from paceline.algorithms import advantages
from paceline.algorithms.algorithm import Algorithm
from paceline.algorithms.policy_losses import LossInputs, LossOutputs, ppo_clip
from paceline.algorithms.rows import Estimates, SampleRows

def grouped(rows, eps=1e-6):
    return advantages.grpo(rows, eps=eps)

class Same(Algorithm):
    scalable = ("clip",)
    def advantages(self, rows):
        return advantages.grpo(rows)
    def loss(self, inputs):
        return ppo_clip(inputs, self.options["clip"], self.options["clip"], 3.0)

class Gap(Algorithm):
    def advantages(self, rows):
        assert list(rows.log_probs) == ["rollout", "old"]  # the same order in every process
        return Estimates(rows.log_probs["old"] - rows.log_probs["rollout"])
"""


def own(folder: Path, name: str, **keys: Any) -> dict[str, Any]:
    file = folder / "my_algorithms.py"
    file.write_text(ALGORITHMS)
    path = f"{file}:{name}"
    return {
        **GROUPS,
        **({"type": "custom", "path": path} if name[0].isupper() else {"adv_estimator": path}),
        **keys,
    }


def steps_of(model: Path, ranks: Ranks, algorithm: dict[str, Any], **actor: Any) -> list[dict[str, float]]:
    learner = Learner.build(run_config(model, algorithm=algorithm, actor=actor), ranks)
    return [numbers(take_step(learner, step)) for step in (1, 2)]


def test_an_own_estimator_and_algorithm_equal_to_the_built_in_ones_give_their_numbers_to_the_bit(
    tmp_path: Path, model: Path, ranks: Ranks
) -> None:
    actor = {"clip_ratio": 0.01, "ppo_epochs": 2}
    built_in = without_audit(steps_of(model, ranks, GROUPS, **actor))
    assert built_in[1]["actor/pg_clipfrac"] > 0
    assert without_audit(steps_of(model, ranks, own(tmp_path, "grouped"), **actor)) == built_in
    same = own(tmp_path, "Same", options={"clip": 0.01})
    assert without_audit(steps_of(model, ranks, same, ppo_epochs=2)) == built_in


def without_audit(steps: list[dict[str, float]]) -> list[dict[str, float]]:
    """Without the numbers of a first mini-batch that was scored, which an own estimator has in every step."""
    return [
        {name: value for name, value in step.items() if not name.startswith("actor/first_")} for step in steps
    ]


def test_an_algorithm_reads_the_log_probs_by_name(tmp_path: Path, model: Path, ranks: Ranks) -> None:
    metrics = steps_of(model, ranks, own(tmp_path, "Gap"))[0]
    # The sampled log-probs of the made-up batch are far from the learner's.
    assert abs(metrics["critic/advantages/mean"]) > 0.1
    assert metrics["actor/grad_norm"] > 0


def test_the_guard_scales_what_is_declared_and_nothing_else(tmp_path: Path) -> None:
    config = run_config(Path("m"), algorithm=own(tmp_path, "Same", options={"clip": 0.2}))
    ones = torch.ones(1, 2)
    inputs = LossInputs(
        log_probs=ones * 0.15, log_probs_of={"old": 0 * ones}, advantages=ones, mask=ones.bool()
    )
    clipped = [
        float(algorithm_of(config, clip_scale=scale).loss(inputs).metrics["pg_clipfrac"])
        for scale in (1.0, 0.5)
    ]
    assert clipped == [0.0, 1.0]
    path = f"{write(tmp_path, READS_CLIP)}:reads_clip"
    seen = []
    for scalable in ((), ("clip_low",)):
        loss = {"type": "custom", "path": path, "options": {"clip_low": 0.5}, "scalable": scalable}
        config = run_config(Path("m"), algorithm=GROUPS, actor={"policy_loss": loss})
        seen.append(float(algorithm_of(config, clip_scale=0.5).loss(inputs).metrics["clip"]))
    assert seen == [0.5, 0.25]


READS_CLIP = """
def reads_clip(inputs: LossInputs, clip_low: float) -> LossOutputs:
    return LossOutputs(-inputs.log_probs, {"clip": clip_low})
"""


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("return rows.scores", r"returned Tensor; return Estimates\(advantages, returns\)"),
        ("return Estimates(rows.scores)", r"returned advantages of \(4,\) torch.float32; .*here \(4, 3\)"),
        ("return Estimates(rows.token_rewards / 0)", r"its advantages are not finite"),
        (
            "return Estimates(rows.token_rewards - rows.scores.mean())",
            r"differ when the rows lie on two ranks",
        ),
        ("return Estimates(rows.log_probs['teacher'])", r"raised KeyError: 'teacher'.*has old, rollout"),
        (
            "return Estimates(rows.token_rewards, rows.token_rewards)",
            r"returned some returns, and the run has no",
        ),
    ],
)
def test_an_estimator_that_cannot_be_trained_with_is_one_sentence(
    tmp_path: Path, body: str, said: str
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(f"from paceline.algorithms.rows import Estimates\ndef mine(rows):\n    {body}\n")
    config = run_config(Path("m"), algorithm={**GROUPS, "adv_estimator": f"{file}:mine"})
    with pytest.raises(ConfigError, match=said) as caught:
        try_algorithm(config)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(f"advantage estimator '{file}:mine'")


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("loss = x - x.mean(0)", r"its loss differs when sequences are passed one by one"),
        ("loss = x / inputs.mask.sum()", r"its loss differs when"),
        ("loss = x\n    metrics = {'most': x.min()}", r"its metric 'most' differs when"),
        (
            "same = (inputs.group_ids[:, None] == inputs.group_ids) * 1.0\n    loss = x - same @ x.detach()",
            r"its loss differs when",
        ),
        ("loss = x - inputs.values.detach().mean(0)", r"its loss differs when"),
    ],
)
def test_a_loss_that_depends_on_the_cut_is_refused(tmp_path: Path, body: str, said: str) -> None:
    head = "def cut(inputs):\n    x, metrics = inputs.log_probs, {}\n"
    text = f"{head}    {body}\n    return LossOutputs(loss, metrics)"
    with pytest.raises(ConfigError, match=said):
        try_own(f"{write(tmp_path, text)}:cut", {}, adv_estimator="gae" if "values" in body else "grpo")


@pytest.mark.parametrize(
    ("head", "said"),
    [
        (
            "needs = ('critic', 'greedy')",
            r"needs critic, greedy, .* write algorithm.needs: \[critic, greedy\]",
        ),
        (
            "networks = ('teacher',)",
            r"reads the network teacher, .* write algorithm.networks: \{teacher: FOLDER\}",
        ),
    ],
)
def test_an_algorithm_says_what_the_run_lacks(tmp_path: Path, head: str, said: str) -> None:
    file = tmp_path / "lacks.py"
    file.write_text(
        f"from paceline.algorithms.algorithm import Algorithm\nclass Lacks(Algorithm):\n    {head}\n"
    )
    config = run_config(Path("m"), algorithm={**GROUPS, "type": "custom", "path": f"{file}:Lacks"})
    with pytest.raises(ConfigError, match=said):
        try_algorithm(config)


def test_an_own_loss_without_clip_ranges_and_a_guard_that_lowers_them(tmp_path: Path) -> None:
    algorithm = own(tmp_path, "Same", options={"clip": 0.2})
    file = tmp_path / "my_algorithms.py"
    guard = {"ppo_kl": {"lower_clip": 0.1}}
    try_algorithm(run_config(Path("m"), algorithm=algorithm, guard=guard))
    file.with_name("unscaled.py").write_text(ALGORITHMS.replace('scalable = ("clip",)', "scalable = ()"))
    algorithm["path"] = f"{tmp_path}/unscaled.py:Same"
    try_algorithm(run_config(Path("m"), algorithm=algorithm))
    with pytest.raises(ConfigError, match="names no clip range, but a guard rule may lower_clip"):
        try_algorithm(run_config(Path("m"), algorithm=algorithm, guard=guard))


def test_what_an_own_estimator_needs_is_what_the_run_makes() -> None:
    def traits(*needs: str) -> frozenset[str]:
        algorithm = {**GROUPS, "adv_estimator": "my.py:f", "needs": needs}
        config = run_config(Path("m"), algorithm=algorithm)
        return config.needs

    assert [traits(), traits("critic"), traits("greedy")] == [set(), {"critic"}, {"greedy"}]
    algorithm = {**GROUPS, "adv_estimator": "my.py:f", "needs": ("group",)}
    with pytest.raises(ValueError, match=r"adv_estimator=my\.py:f compares the samples of a group"):
        run_config(Path("m"), algorithm=algorithm, rollout={"n": 1})
    with pytest.raises(ValueError, match="grpo is built in"):
        run_config(Path("m"), algorithm={**GROUPS, "needs": ("critic",)})


def test_estimates_of_the_users_own_are_0_under_the_mask_and_have_no_graph() -> None:
    ones = torch.ones(2, 2, requires_grad=True)
    mask = torch.tensor([[True, False], [True, True]])
    rows = SampleRows(scores=ones[0], token_rewards=ones, mask=mask, group_ids=torch.tensor([0, 0]))
    result = checked_estimates("mine", lambda rows: Estimates(rows.token_rewards * 2), rows).advantages
    assert result.tolist() == [[2.0, 0.0], [2.0, 2.0]]
    assert not result.requires_grad


def test_the_warm_up_of_the_critic_has_its_own_lambda() -> None:
    """Rewards at the end alone: the target of the first token is lambda times it, with values of 0."""
    table = torch.tensor([[0.0, 1.0]])
    rows = SampleRows(
        scores=table.sum(-1),
        token_rewards=table,
        mask=torch.ones(1, 2),
        group_ids=torch.tensor([0]),
        values=torch.zeros(1, 2),
    )
    for name, key in (("gae", "lam"), ("vapo", "lam_critic")):
        algorithm = {**GROUPS, "adv_estimator": name, key: 0.5}
        config = run_config(Path("m"), algorithm=algorithm, critic={"warmup": 1, "warmup_lam": 0.25})
        targets = [
            algorithm_of(config, critic_alone=alone).advantages(rows).returns for alone in (False, True)
        ]
        assert [float(target[0, 0]) for target in targets if target is not None] == [0.5, 0.25]
