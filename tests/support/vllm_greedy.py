"""Greedy tokens of a vLLM that got a push, of one that loaded the export, and of transformers.

    python -m support.vllm_greedy [MODEL_TYPE ...]     # prints a line of JSON per architecture for text

A tiny model of the kind is exported. One engine loads the export. Another starts without weights and gets
what a push brings: the slices of the plan where it is direct, else full tensors through vLLM's own loader.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

NUM_TOKENS = 16
TIE = 1e-4
PROMPTS = ((5, 17, 102, 3), (190, 7, 64), (11, 12, 13, 14, 15, 16, 17, 18, 19), (150,))

CHANGES: dict[str, dict[str, Any]] = {
    # As published. Scores far beyond the tiny model's cap of 2 are NaN in vLLM's kernel for the CPU (0.32).
    "gemma2": {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
}

Response = list[tuple[int, float]]
"""Tokens and their log-probs."""


def compare(model_type: str) -> dict[str, Any]:
    """Whether all three choose the same tokens, and the largest difference of log-probs to transformers'.

    transformers' responses end where its two best tokens are closer than TIE: rounding chooses there.
    """
    from support.vllm_families import export

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tensors = export(model_type, folder, **CHANGES.get(model_type, {}))
        expected = _transformers(folder / "export")
        loaded, _ = _vllm(folder / "export")
        pushed, path = _vllm(folder / "export", tensors)
    pairs = [
        (theirs, ours)
        for theirs_of_prompt, ours_of_prompt in zip(expected, pushed, strict=True)
        for theirs, ours in zip(theirs_of_prompt, ours_of_prompt, strict=False)
    ]
    return {
        "model_type": model_type,
        "push": path,
        "pushed_as_loaded": pushed == loaded,
        "pushed_as_transformers": all(theirs[0] == ours[0] for theirs, ours in pairs),
        "num_compared": len(pairs),
        "largest_difference": max(abs(theirs[1] - ours[1]) for theirs, ours in pairs),
    }


def _transformers(folder: Path) -> list[Response]:
    import torch

    from paceline.learner.model.architectures import model_class
    from paceline.learner.model.loading import read_config

    # "sdpa" would leave out Gemma 2's softcap.
    kind = model_class(read_config(folder))
    model: Any = kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    responses = []
    for prompt in PROMPTS:
        tokens: Response = []
        for _ in range(NUM_TOKENS):
            ids = [*prompt, *(token for token, _ in tokens)]
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].float()
            best = logits.log_softmax(-1).topk(2)
            if best.values[0] - best.values[1] < TIE:
                break
            tokens.append((int(best.indices[0]), float(best.values[0])))
        responses.append(tokens)
    return responses


def _vllm(folder: Path, pushed: dict[str, Any] | None = None) -> tuple[list[Response], str]:
    """Greedy responses, and how the weights came."""
    from vllm import SamplingParams

    from support.vllm_reloaded import tiny_engine

    engine = tiny_engine(folder, "auto" if pushed is None else "dummy")
    path = "export" if pushed is None else _push(engine, pushed)
    sampling = SamplingParams(
        temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=0, detokenize=False
    )
    outputs = engine.generate(
        [{"prompt_token_ids": list(prompt)} for prompt in PROMPTS], sampling, use_tqdm=False
    )
    responses = [
        [
            (token, entry[token].logprob)
            for token, entry in zip(output.outputs[0].token_ids, output.outputs[0].logprobs, strict=True)
        ]
        for output in outputs
    ]
    engine.llm_engine.engine_core.shutdown()
    del engine
    gc.collect()
    return responses, path


def _push(engine: Any, tensors: dict[str, Any]) -> str:
    import torch

    from paceline.rollout.engines.weights.layout import describe_model
    from paceline.rollout.engines.weights.trace import recall

    worker = engine.llm_engine.model_executor.driver_worker.worker
    model = worker.get_model()
    if describe_model(model).full_tensors:
        worker._paceline_receiver()._load_full(iter(tensors.items()))
        return "general"
    params = dict(model.named_parameters())
    trace = recall(model)
    assert trace is not None
    with torch.no_grad():
        for part in trace.slices:
            params[part.param][part.local_box.slices] = tensors[part.name][part.box.slices]
    return "direct"


def _route_by_sigmoid_without_groups() -> None:
    """Gives vLLM's router for the CPU one group of all experts: by sigmoid, 0.32 scores in groups alone."""
    from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter

    start = CPURouter.__init__

    def in_one_group(self: Any, *args: Any, **kwargs: Any) -> None:
        start(self, *args, **kwargs)
        if self.scoring_func == "sigmoid" and not self.use_grouped_topk:
            self.use_grouped_topk, self.num_expert_group, self.topk_group = True, 1, 1

    CPURouter.__init__ = in_one_group


def main(kinds: list[str]) -> int:
    """Prints a line of JSON per architecture; returns how many differ."""
    from paceline.rollout.engines.vllm.start import environment

    os.environ.update(environment.in_this_process())
    environment.prepare_cpu()
    _route_by_sigmoid_without_groups()
    from paceline.models.facts import ARCHITECTURES, MODELS_WITH_IMAGES

    num_wrong = 0
    for kind in kinds or [kind for kind in ARCHITECTURES if kind not in MODELS_WITH_IMAGES]:
        outcome = compare(kind)
        num_wrong += not (outcome["pushed_as_loaded"] and outcome["pushed_as_transformers"])
        print(json.dumps(outcome), flush=True)
    return num_wrong


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
