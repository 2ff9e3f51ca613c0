"""Every architecture of the table in vLLM's own classes: a push writes what loading the export writes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

from support.architectures import documented_pushes
from support.source import ROOT

pytestmark = [
    pytest.mark.timeout(1800),
    pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM: pip install -r requirements/cpu.txt"),
]


def run(*command: str) -> subprocess.CompletedProcess[str]:
    """A module of the tests, in a process of its own."""
    paths = [ROOT / "src", *(ROOT / "services").glob("*"), ROOT / "tests"]
    return subprocess.run(
        [sys.executable, "-m", *command],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))},
        capture_output=True,
        text=True,
        timeout=1700,
        check=False,
    )


@pytest.mark.parametrize("kind", ["deepseek_v2", "deepseek_v3"])
def test_loads_of_full_tensors_reach_what_vllm_makes_of_latent_attention(kind: str) -> None:
    """Matrices that vLLM derives from `kv_b_proj` after a load, and corrections of routers' scores."""
    done = run("support.vllm_reloaded", kind)
    assert done.returncode == 0, (done.stdout[-2000:], done.stderr[-2000:])
    empty, *loaded = json.loads(done.stdout.splitlines()[-1])
    assert empty > 0.1
    assert len(loaded) == 3
    assert max(loaded) < 1e-4


def test_a_push_into_each_family_writes_what_its_export_holds() -> None:
    done = run("support.vllm_families")
    outcomes = {row["model_type"]: row for row in map(json.loads, done.stdout.splitlines())}
    assert done.returncode == 0, (done.stdout[-2000:], done.stderr[-2000:])
    assert {kind: row["push"] for kind, row in outcomes.items()} == documented_pushes()
    general = {kind for kind, row in outcomes.items() if row["push"] == "general"}
    # A CPU repacks experts for its kernel; everything else is pushed in place.
    assert general == {
        "deepseek_v2",
        "deepseek_v3",
        "glm4_moe",
        "glm4_moe_lite",
        "gpt_oss",
        "llama4_text",
        "minimax_m2",
        "mixtral",
        "olmoe",
        "qwen2_moe",
        "qwen3_5_moe",
        "qwen3_5_moe_text",
        "qwen3_moe",
        "qwen3_next",
        "qwen3_vl_moe",
    }
    assert all("prepack_moe_weight" in outcomes[kind]["reason"] for kind in general)
    planned = {kind for kind, row in outcomes.items() if row["planned"] is not None}
    assert {"llama", "qwen2", "qwen3_moe", "mixtral", "deepseek_v2", "deepseek_v3"} <= planned
    assert [kind for kind in planned if outcomes[kind]["planned"] != outcomes[kind]["cached"]] == []


def test_greedy_tokens_after_a_push_are_those_of_the_export_in_vllm_and_transformers() -> None:
    """One family by the general path, with attention sinks, and one by slices, of fused projections."""
    done = run("support.vllm_greedy", "gpt_oss", "phi3")
    outcomes = list(map(json.loads, done.stdout.splitlines()))
    assert [row["push"] for row in outcomes] == ["general", "direct"], done.stderr[-2000:]
    assert all(row["pushed_as_loaded"] and row["pushed_as_transformers"] for row in outcomes), outcomes
    assert all(row["num_compared"] >= 40 and row["largest_difference"] < 1e-4 for row in outcomes), outcomes
