"""What `paceline check` says of the engine's log-probs, by a running engine."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from paceline.checks import service_checks
from paceline.core.errors import ModelError
from support.cli_configs import config
from support.tiny_vl import tiny_vl_config
from support.vllm_families import family_config

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM: pip install -r requirements/cpu.txt"),
]


def test_the_engines_log_probs_are_the_learners_and_others_are_a_fault(tmp_path: Path) -> None:
    """A Gemma 2, whose softcaps and windows would show, with few positions: the engine may take no more."""
    model, kept = tmp_path / "model", tmp_path / "kept"
    gemma = family_config("gemma2")
    gemma.max_position_embeddings = 64
    gemma.save_pretrained(model)
    kept.mkdir()
    run = config(model={"path": str(model), "load_format": "random"})
    assert "packed log-probs are those of each sequence alone" in service_checks.self_test(run, kept)
    line = service_checks.engine_log_probs(run, kept)
    text, _, number = line.rpartition(" ")
    assert text == "vLLM's log-probs are the learner's (largest difference"
    assert 0 < float(number.rstrip(")")) < 1e-4

    rows = json.loads((kept / "scored_rows.json").read_text(encoding="utf-8"))
    rows[-1]["log_probs"][-1] += 0.02
    (kept / "scored_rows.json").write_text(json.dumps(rows), encoding="utf-8")
    with pytest.raises(ModelError, match=r"differ from the learner's by up to 0.02 nats \(allowed 0.001\)"):
        service_checks.engine_log_probs(run, kept)


@pytest.mark.parametrize("kind", ["deepseek_v2", "deepseek_v3"])
def test_latent_attention_has_the_same_log_probs_in_the_engine(kind: str, tmp_path: Path) -> None:
    """vLLM's own rotary kernel for the CPU would give others, by 0.5 nats and more.

    So would routing by softmax, which vLLM takes for DeepSeek-V3 by the config.json that transformers writes.
    """
    model, kept = tmp_path / "model", tmp_path / "kept"
    family_config(kind).save_pretrained(model)
    kept.mkdir()
    run = config(model={"path": str(model), "load_format": "random"})
    service_checks.self_test(run, kept)
    number = service_checks.engine_log_probs(run, kept).rpartition(" ")[2]
    assert 0 < float(number.rstrip(")")) < 1e-4


def test_a_head_size_that_the_engine_lacks_is_a_fault_with_its_reason(tmp_path: Path) -> None:
    """vLLM's attention for CPUs loads such a model, and refuses its first tokens."""
    model, kept = tmp_path / "model", tmp_path / "kept"
    gemma = family_config("gemma2")
    gemma.head_dim = 24
    gemma.save_pretrained(model)
    kept.mkdir()
    run = config(model={"path": str(model), "load_format": "random"})
    service_checks.self_test(run, kept)
    with pytest.raises(
        ModelError, match="vLLM does not run this model .*head_dim=24.*; use a model of"
    ) as caught:
        service_checks.engine_log_probs(run, kept)
    assert "\n" not in str(caught.value)


def test_rows_with_images_are_compared_and_other_pixels_are_a_fault(tmp_path: Path) -> None:
    model, kept = tmp_path / "model", tmp_path / "kept"
    tiny_vl_config().save_pretrained(model)
    kept.mkdir()
    run = config(model={"path": str(model), "load_format": "random"})
    service_checks.self_test(run, kept)
    line = service_checks.engine_log_probs(run, kept)
    text, _, number = line.rpartition(" ")
    assert text == "vLLM's log-probs are the learner's, in prompts with images, too (largest difference"
    assert 0 < float(number.rstrip(")")) < 1e-4

    pixels = dict(np.load(kept / "images.npz"))
    pixels[min(pixels)] += 0.3
    np.savez(kept / "images.npz", **pixels)
    with pytest.raises(ModelError, match=r"differ from the learner's by up to 0.1 nats \(allowed 0.001\)"):
        service_checks.engine_log_probs(run, kept)
