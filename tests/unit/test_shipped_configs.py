"""Every configuration that is shipped parses, and says what its name says."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from paceline.config.base import Section
from paceline.config.load import dump_yaml, load, parse
from paceline.config.run import RunConfig
from paceline.config.tuning import DpoRunConfig, RmRunConfig, SftRunConfig
from paceline.core.errors import ConfigError

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SHIPPED = sorted(EXAMPLES.rglob("*.yaml"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: f"{p.parent.name}/{p.name}")
def test_it_parses_and_survives_its_own_dump(path: Path) -> None:
    tree = yaml.safe_load(path.read_text())
    kinds: dict[str, type[Section]] = {"sft": SftRunConfig, "rm": RmRunConfig, "dpo": DpoRunConfig}
    kind = next((kind for section, kind in kinds.items() if section in tree), RunConfig)
    config = load(kind, path)
    assert parse(kind, yaml.safe_load(dump_yaml(config))) == config


def test_pairs_are_read_by_ranks_with_whole_matrices() -> None:
    learner = {"world_size": 2, "tensor_parallel": 2}
    pairs = {"train_files": "x.jsonl", "output": "out", "steps": 1}
    for kind, section in ((RmRunConfig, "rm"), (DpoRunConfig, "dpo")):
        tree = {"model": {"path": "m"}, "data": {}, section: pairs}
        assert parse(kind, tree | {"learner": {"world_size": 2}}).learner.world_size == 2
        with pytest.raises(ConfigError, match=r"leave learner\.tensor_parallel out"):
            parse(kind, tree | {"learner": learner})


def test_the_demo_uses_what_it_promises() -> None:
    config = load(RunConfig, EXAMPLES / "arithmetic" / "ppo.yaml")
    assert "critic" in config.needs
    assert config.needs_reference
    assert config.algorithm.kl_ctrl.type == "adaptive"
    assert config.actor.use_dual_clip
    assert config.learner.world_size == 2
    grpo = load(RunConfig, EXAMPLES / "arithmetic" / "grpo.yaml")
    assert "critic" not in grpo.needs


MINIMAL = {
    "data": {"train_files": "t.jsonl"},
    "model": {"path": "m"},
    "reward": {"functions": [{"name": "exact_match"}]},
    "trainer": {"total_steps": 1},
}


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("trainer.total_step=3", "unknown key trainer.total_step; did you mean 'total_steps'?"),
        ("actor.optim.lr=fast", "actor.optim.lr='fast': Input should be a valid number"),
        ("trainer.total_steps=-1", "trainer.total_steps=-1: Input should be greater than or equal to 0"),
        ("rollout.top_p=0.9", "top_p=0.9, top_k=0: truncated sampling"),
        (
            "actor.ppo_mini_batch_size=24",
            "actor.ppo_mini_batch_size=24 must divide data.train_batch_size=64, as 8 does",
        ),
        ("reward.functions=[gsm8k]", "reward.functions.0='gsm8k': must be a section, such as {name: gsm8k}"),
        ("actor.optim=1e-6", "actor.optim=1e-06: must be a section, such as {lr: ...}"),
        ("trainer.loggers=wandb", "trainer.loggers='wandb': must be a list, such as [wandb]"),
        ("reward.functions=[]", "no scorer: name at least one"),
        (
            "rollout.n=8192",
            "a step of 524,288 rows (data.train_batch_size x rollout.n) needs messages of up to 128 MiB",
        ),
        ("learner.context_parallel=2", "learner.context_parallel=2 must divide learner.world_size=1"),
        ("learner.tensor_parallel=2", "learner.tensor_parallel=2 must divide learner.world_size=1"),
        (
            "learner={world_size: 4, fsdp_size: 2, tensor_parallel: 4}",
            "learner.tensor_parallel=4 must divide the 2 ranks that share a copy of the weights",
        ),
        (
            "learner={world_size: 4, tensor_parallel: 2, context_parallel: 4}",
            "learner.tensor_parallel=2: these ranks also share the tokens of rows; leave out",
        ),
        (
            "learner={world_size: 4, fsdp_size: 2, expert_parallel: 4}",
            "learner.expert_parallel=4 must divide the 2 ranks that share a copy of the weights",
        ),
        ("learner={world_size: 6, fsdp_size: 4}", "learner.fsdp_size=4 must divide learner.world_size=6"),
        ("actor.clip_ratio_c=1.1", "must exceed 1 + the upper clip range"),
        ("actor.policy_loss=gspo", "actor: policy_loss=gspo clips the ratio"),
        ("actor.policy_loss=gspo", "a range of 0.2 and 0.2 clips nothing; set actor.clip_ratio_low=3e-4"),
        ("actor={policy_loss: geo_mean, clip_ratio: 3.0e-4}", "nearly all of them; set actor.clip_ratio=0.4"),
        ("actor.policy_loss={type: gspo, clip_ratio_low: 3.0e-4}", "a range of 0.0003 and 0.2 clips nothing"),
        (
            "actor.policy_loss={type: clip_cov, cov_low: 6.0}",
            "actor.policy_loss: cov_low=6 must not exceed cov_high=5",
        ),
        ("actor.cov_low=6.0", "cov_low; it is an option of actor.policy_loss={type: clip_cov, cov_low: ...}"),
        (
            "actor.policy_loss=ppo",
            "actor.policy_loss: 'ppo' is not known; choose one of ppo_clip, gspo, cispo",
        ),
        (
            "actor.policy_loss.clip_ratio_low=0.1",
            "lacks its type; add type: NAME, such as actor.policy_loss={type: ppo_clip}",
        ),
        (
            "actor.policy_loss={type: sapo, tau_negativ: 2}",
            "actor.policy_loss.tau_negativ; did you mean 'tau_negative'?",
        ),
        (
            "actor.policy_loss={type: sapo, tau_negative: 0}",
            "actor.policy_loss.tau_negative=0: Input should be greater",
        ),
        ("actor.policy_loss=custom", "actor.policy_loss.path is required; add it"),
        (
            "actor.policy_loss={type: custom, path: my.py}",
            "write path/to/file.py:function or module:function",
        ),
        (
            "algorithm.overlong={enable: true, buffer_length: 1000}",
            "algorithm.overlong.buffer_length=1000 must not exceed",
        ),
        (
            "algorithm.rollout_correction={method: icepop, level: sequence}",
            "token by token, level=sequence is not",
        ),
        ("algorithm.rollout_correction={low: 2, high: 1}", "low=2 must be below high=1"),
        (
            "actor.clip_ratio=1.5",
            "actor.clip_ratio=1.5: 1 - clip_ratio would be below 0, which no ratio reaches; set it to 1 at",
        ),
        (
            "critic.optim.betas=[1.5, -2]",
            "critic.optim.betas=[1.5, -2]: each is the decay rate of a moving average, at least 0",
        ),
        (
            "actor.optim.betas=[0.9, 1.0]",
            "actor.optim.betas=[0.9, 1.0]: each is the decay rate of a moving average",
        ),
        (
            "actor.loss_agg_constant=100",
            "only by loss_agg_mode=seq-mean-token-sum-norm, and token-mean is in force; set that mode",
        ),
        (
            "algorithm={adv_estimator: gae, kl_ctrl: {type: adaptive}}",
            "kl_ctrl.type=adaptive steers the coefficient of a KL in the reward, and this run has none; set",
        ),
        (
            "critic.warmup=1 algorithm.adv_estimator=gae",
            "critic.warmup=1 leaves none of trainer.total_steps=1 to the policy; lower it, or raise",
        ),
        *(
            (
                f"rollout.n=1 algorithm.adv_estimator={estimator}",
                f"{estimator} compares the samples of a group: rollout.n must be at least 2",
            )
            for estimator in (
                *("grpo", "dr_grpo", "rloo", "reinforce_plus_plus_baseline", "opo", "gpg", "pass_at_k"),
            )
        ),
        (
            "rollout.n=1 algorithm.adv_estimator=gae algorithm.resample.method=max_min",
            "resample.method=max_min draws from a group's best and worst: rollout.n must be at least 2",
        ),
        ("nonsense", "must look like dotted.key=value"),
        ("model.path.x=1", "'path' is a value, not a section"),
    ],
)
def test_bad_values_are_named_with_what_to_write(tmp_path: Path, override: str, said: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(yaml.safe_dump(MINIMAL))
    overrides = override.split(" ") if " algorithm." in override else [override]
    with pytest.raises(ConfigError) as caught:
        load(RunConfig, file, overrides)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "read", "expected"),
    [
        (
            "actor.clip_ratio=1",
            lambda c: c.actor.loss_arguments,
            {"clip_low": 1.0, "clip_high": 1.0, "dual_clip_c": 3.0},
        ),
        ("actor.optim.betas=[0,0.999]", lambda c: c.actor.optim.betas, (0.0, 0.999)),
        (
            "actor.loss_agg_constant=100 actor.loss_agg_mode=seq-mean-token-sum-norm",
            lambda c: (c.actor.aggregation, c.actor.loss_agg_constant),
            ("seq-mean-token-sum-norm", 100.0),
        ),
        (
            "algorithm.adv_estimator=gae critic.warmup=1 trainer.total_steps=2",
            lambda c: ("critic" in c.needs, c.trainer.total_steps - c.critic.warmup),
            (True, 1),
        ),
        ("critic.warmup=9", lambda c: ("critic" in c.needs, c.critic.warmup), (False, 9)),
        (
            "algorithm.adv_estimator=reinforce_plus_plus rollout.n=1",
            lambda c: (c.algorithm.adv_estimator, c.rollout.n, "critic" in c.needs),
            ("reinforce_plus_plus", 1, False),
        ),
        (
            "algorithm.adv_estimator=grpo rollout.n=2 algorithm.resample.method=max_min",
            lambda c: (c.rollout.n, c.algorithm.resample.method),
            (2, "max_min"),
        ),
    ],
)
def test_values_at_the_edge_of_what_is_refused(
    tmp_path: Path, overrides: str, read: Callable[[RunConfig], object], expected: object
) -> None:
    """What they do in a step: tests/numerics/test_learner_step.py, test_values_at_the_edge_*."""
    file = tmp_path / "c.yaml"
    file.write_text(yaml.safe_dump(MINIMAL))
    assert read(load(RunConfig, file, overrides.split(" "))) == expected


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("model: {path: m}\nactor: {}\nmodel: {path: n}\n", "the key model is in line 1 and again in line 3"),
        (
            "actor:\n  clip_ratio: 0.1\n  optim: {}\n  clip_ratio: 0.2\n",
            "the key clip_ratio is in line 2 and again in line 4",
        ),
        (
            "reward:\n  functions:\n    - name: a\n      name: b\n",
            "the key name is in line 3 and again in line 4",
        ),
        ("data: {a: 1, a: 1}\n", "the key a is in line 1 and again in line 1"),
    ],
)
def test_a_key_twice_in_a_file_is_refused_with_both_lines(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(f"{file}: {said}; keep one of them")):
        load(RunConfig, file)
    below = tmp_path / "below.yaml"
    below.write_text("extends: c.yaml\n")
    with pytest.raises(ConfigError, match=re.escape(said)):
        load(RunConfig, below)


def test_a_key_may_stand_over_one_that_is_merged_in(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(
        yaml.safe_dump(MINIMAL) + "actor: {optim: &usual {lr: 1.0e-5, weight_decay: 0.0}}\n"
        "critic: {optim: {<<: *usual, lr: 1.0e-4}}\n"
    )
    config = load(RunConfig, file)
    assert (config.critic.optim.lr, config.critic.optim.weight_decay) == (1e-4, 0.0)


def test_a_policy_loss_is_a_name_or_a_name_with_its_options(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(yaml.safe_dump(MINIMAL))

    def arguments(*overrides: str) -> dict[str, object]:
        return load(RunConfig, file, overrides).actor.loss_arguments

    short = load(RunConfig, file, ["actor.policy_loss=kl_cov"])
    assert short == load(RunConfig, file, ["actor.policy_loss={type: kl_cov}"])
    assert short.actor.loss_arguments == {"cov_fraction": 2e-4, "cov_kl_coef": 1.0}
    assert arguments() == {"clip_low": 0.2, "clip_high": 0.2, "dual_clip_c": 3.0}
    # The actor's range stands where the loss does not set its own.
    asked = ["actor.clip_ratio=0.01", "actor.clip_ratio_high=0.02", "actor.use_dual_clip=false"]
    assert arguments(*asked) == {"clip_low": 0.01, "clip_high": 0.02, "dual_clip_c": None}
    assert arguments(*asked, "actor.policy_loss={type: gspo, clip_ratio_low: 3e-4}") == {
        "clip_low": 3e-4,
        "clip_high": 0.02,
    }
    custom = "actor.policy_loss={type: custom, path: 'my.py:my_loss', options: {beta: 0.5}}"
    assert arguments(custom) == {"beta": 0.5}


@pytest.mark.parametrize(
    ("loss", "own"),
    [
        ("ppo_clip", "token-mean"),
        ("cispo", "token-mean"),
        ("kl_cov", "token-mean"),
        ("clip_cov", "token-mean"),
        ("gpg", "token-mean"),
        ("{type: custom, path: 'my.py:my_loss'}", "token-mean"),
        ("{type: gspo, clip_ratio_low: 3e-4, clip_ratio_high: 4e-4}", "seq-mean-token-mean"),
        ("{type: geo_mean, clip_ratio_low: 0.4, clip_ratio_high: 0.4}", "seq-mean-token-mean"),
        ("sapo", "seq-mean-token-mean"),
    ],
)
def test_a_loss_is_aggregated_as_its_paper_does_unless_something_else_is_written(
    tmp_path: Path, loss: str, own: str
) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(yaml.safe_dump(MINIMAL))

    def mode(*overrides: str) -> str:
        return load(RunConfig, file, [f"actor.policy_loss={loss}", *overrides]).actor.aggregation

    assert mode() == mode("actor.loss_agg_mode=null") == own
    assert mode("actor.loss_agg_mode=seq-mean-token-sum") == "seq-mean-token-sum"


def test_overrides_are_typed_like_the_file(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(yaml.safe_dump(MINIMAL))
    config = load(
        RunConfig,
        file,
        ["actor.optim.lr=1e-4", "reward.functions.0.weight=2", "rollout.threads=null", "data.shuffle=no"],
    )
    assert config.actor.optim.lr == 1e-4
    assert config.reward.functions[0].weight == 2
    assert config.rollout.threads is None
    assert config.data.shuffle is False
    for written, meant in (("on", "on"), ("off", "off"), ("true", "on"), ("auto", "auto")):
        given = load(RunConfig, file, [f"actor.shared_prompts={written}"]).actor.shared_prompts
        assert given == meant


def test_a_missing_or_broken_file_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read configuration .*nowhere.yaml"):
        load(RunConfig, tmp_path / "nowhere.yaml")
    (tmp_path / "list.yaml").write_text("- 1")
    with pytest.raises(ConfigError, match="must hold a mapping of sections"):
        load(RunConfig, tmp_path / "list.yaml")


def test_a_file_goes_over_the_one_that_it_extends(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(MINIMAL | {"rollout": {"n": 4, "max_num_seqs": 32}}))
    (tmp_path / "middle.yaml").write_text("extends: base.yaml\nrollout: {n: 6}\n")
    top = tmp_path / "sub" / "top.yaml"
    top.write_text(
        "extends: ../middle.yaml\nrollout: {temperature: 0.7}\nreward: {functions: [{name: gsm8k}]}\n"
    )
    config = load(RunConfig, top, ["trainer.total_steps=9"])
    assert (config.rollout.n, config.rollout.temperature, config.rollout.max_num_seqs) == (6, 0.7, 32)
    assert [one.name for one in config.reward.functions] == ["gsm8k"]
    assert config.trainer.total_steps == 9


def test_a_file_that_extends_nothing_or_itself_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("extends: b.yaml")
    with pytest.raises(ConfigError, match=r"cannot read configuration .*b.yaml, which .*a.yaml extends"):
        load(RunConfig, tmp_path / "a.yaml")
    (tmp_path / "b.yaml").write_text("extends: a.yaml")
    with pytest.raises(ConfigError, match=r"extends itself .* break the circle"):
        load(RunConfig, tmp_path / "a.yaml")
    (tmp_path / "c.yaml").write_text("extends: [a.yaml]")
    with pytest.raises(ConfigError, match="must be the path of one YAML file"):
        load(RunConfig, tmp_path / "c.yaml")


@pytest.mark.parametrize(
    ("text", "override", "said"),
    [
        ("", "trainer.total_step=3", "the command line: unknown key trainer.total_step"),
        ("", "actor.ppo_mini_batch_size=24", "the command line: actor.ppo_mini_batch_size=24 must divide"),
        (
            "",
            "trainer={}",
            "the command line: trainer: the length of the run is missing: set total_steps or total_epochs",
        ),
        ("rollot: {n: 2}", "rollout.n=4", "c.yaml: unknown key rollot; did you mean 'rollout'?"),
    ],
)
def test_a_fault_is_blamed_on_where_it_was_written(
    tmp_path: Path, text: str, override: str, said: str
) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(yaml.safe_dump(MINIMAL) + text)
    with pytest.raises(ConfigError) as caught:
        load(RunConfig, file, [override])
    assert said in str(caught.value)
    assert ("the command line" in str(caught.value)) != ("c.yaml" in str(caught.value))


def test_faults_of_the_file_and_of_the_command_line_are_told_apart(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(yaml.safe_dump(MINIMAL) + "rollot: {n: 2}")
    with pytest.raises(ConfigError) as caught:
        load(RunConfig, file, ["trainer.totl_steps=3"])
    assert str(caught.value).splitlines() == [
        f"{file}: unknown key rollot; did you mean 'rollout'?",
        "the command line: unknown key trainer.totl_steps; did you mean 'total_steps'?",
    ]
