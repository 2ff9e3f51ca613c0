"""Whole episodes with vLLM, per family of chat templates: what is sampled, recorded, and learned from.

Tiny models of the families' architectures with random weights in float32; the templates write the families'
forms. PACELINE_TEST_FIDELITY asks for so many conversations per family; without it there is nothing to run.
Engine and learner run on the GPU where there is one.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from support.token_fidelity import KINDS, find

NUM_CONVERSATIONS = int(os.environ.get("PACELINE_TEST_FIDELITY", "0"))
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed"),
    pytest.mark.torch,
    pytest.mark.timeout(1800),
    pytest.mark.filterwarnings("ignore"),  # vLLM and its imports warn about themselves
    pytest.mark.skipif(NUM_CONVERSATIONS == 0, reason="PACELINE_TEST_FIDELITY=NUMBER of conversations"),
]


@pytest.mark.parametrize("family", KINDS)
def test_what_is_trained_is_what_was_sampled(family: str, tmp_path: Path) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    finding = find(family, NUM_CONVERSATIONS, tmp_path, device=device)
    print(finding)
    assert finding.num_conversations >= NUM_CONVERSATIONS
    assert finding.wrong_turns == 0
    assert finding.told_elsewhere == 0
    assert finding.difference < 1e-4
