"""`paceline check` of frozen networks: which fit a policy, and what is said of the others."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.checks.preflight import quick_check
from paceline.cli.main import main
from paceline.config.run import RunConfig
from paceline.core.errors import ConfigError, ModelError
from paceline.data.frozen_networks import check_frozen_networks
from support.byte_tokenizer import save_tokenizer
from support.cli_configs import config

DATA = {"train_files": ["train.parquet"], "max_prompt_length": 32, "max_response_length": 8}
pytestmark = pytest.mark.usefixtures("forked_checks")


@pytest.fixture
def teacher(project: Path) -> Path:
    """A teacher of the project's policy: wider, with the same tokenizer and a padded vocabulary."""
    save_tokenizer(project / "model")
    folder = project / "teacher"
    shutil.copytree(project / "model", folder)
    for name, size in (("model", 258), ("teacher", 320)):
        file = project / name / "config.json"
        tree = json.loads(file.read_text()) | {"vocab_size": size, "model_type": "qwen2"}
        file.write_text(json.dumps(tree))
    return folder


def distilling(**sections: Any) -> RunConfig:
    algorithm = {"adv_estimator": "mine.py:gap", "networks": {"teacher": "teacher"}}
    return config(**{"data": DATA, "algorithm": algorithm, **sections})


def test_a_frozen_network_that_fits(teacher: Path) -> None:
    quick_check(distilling())
    assert check_frozen_networks(distilling()) == "teacher: teacher, qwen2, 258 tokens as the policy's"
    assert check_frozen_networks(config(data=DATA)) == "none"
    # More tokens than the policy's are no fault: the policy never samples them.
    file = teacher / "tokenizer.json"
    tree = json.loads(file.read_text())
    tree["model"]["vocab"]["more"] = 258
    file.write_text(json.dumps(tree))
    assert "258 tokens as the policy's" in check_frozen_networks(distilling())


@pytest.mark.parametrize(
    ("algorithm", "said"),
    [
        ({"adv_estimator": "grpo"}, r"algorithm.networks: nothing reads the log-probs of teacher, because"),
        ({"networks": {"old": "x"}}, r"networks: 'old' cannot name .* none of rollout, old, reference"),
        ({"networks": {"a b": "x"}}, r"networks: 'a b' cannot name a network: use letters"),
        ({"networks": {"teacher": {"folder": "x"}}}, r"unknown key .*teacher.folder; leave it out"),
    ],
)
def test_a_frozen_network_without_a_use_or_a_name(algorithm: dict[str, Any], said: str) -> None:
    own = {"adv_estimator": "mine.py:gap", "networks": {"teacher": "teacher"}}
    with pytest.raises(ConfigError, match=said):
        config(data=DATA, algorithm={**own, **algorithm})
    short, long = (
        config(data=DATA, algorithm={**own, "networks": {"teacher": teacher}})
        for teacher in ("x", {"path": "x"})
    )
    assert short == long
    assert short.frozen_folders == {"teacher": "x"}
    assert short.scores_first_mini_batch


def _without_weights(teacher: Path) -> None:
    (teacher / "model.safetensors").unlink()


def _other_tokenizer(teacher: Path) -> None:
    text = (teacher / "tokenizer.json").read_text()
    tree = json.loads(text)
    vocab = tree["model"]["vocab"]
    vocab["A"], vocab["B"] = vocab["B"], vocab["A"]
    (teacher / "tokenizer.json").write_text(json.dumps(tree))


def _smaller_vocabulary(teacher: Path) -> None:
    file = teacher / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"vocab_size": 257}))


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (shutil.rmtree, r"algorithm.networks.teacher.path=teacher has no weights"),
        (
            _without_weights,
            r"has no weights \(\*.safetensors\); name the folder of a model, such as one that",
        ),
        (lambda teacher: (teacher / "config.json").unlink(), r"path=teacher is not a model folder"),
        (lambda teacher: (teacher / "tokenizer.json").unlink(), r"folder teacher has no tokenizer"),
        (
            _other_tokenizer,
            r"has another tokenizer than the policy: 2 of 258 tokens differ \('A' has the id \d+ here",
        ),
        (_smaller_vocabulary, r"has a vocab_size of 257 and the policy one of 258, .*; take a model whose"),
    ],
)
def test_a_frozen_network_that_cannot_score_is_refused_before_the_run(
    teacher: Path, spoil: Callable[[Path], None], said: str
) -> None:
    spoil(teacher)
    (teacher / "tokenizer_config.json").unlink(missing_ok=True)
    with pytest.raises(ModelError, match=said):
        quick_check(distilling())


def test_a_frozen_network_sees_the_images_too(teacher: Path) -> None:
    data = {**DATA, "image_key": "images"}
    with pytest.raises(
        ModelError, match=r"\(qwen2\) takes no images, but data.image_key=images supplies some"
    ):
        check_frozen_networks(distilling(data=data))


@pytest.mark.usefixtures("without_torch", "teacher")
def test_check_shows_the_frozen_networks(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "mine.py").write_text("def gap(rows): ...")
    words = ["algorithm.adv_estimator=mine.py:gap", "algorithm.networks.teacher=teacher"]
    main(["check", "run.yaml", *words])
    out = capsys.readouterr().out
    assert "ok    frozen networks: teacher: teacher, qwen2, 258 tokens as the policy's" in out
