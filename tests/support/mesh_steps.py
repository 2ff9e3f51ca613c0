"""Training steps of ranks on any mesh, with parameters that can be compared over meshes; in each rank."""

from __future__ import annotations

import datetime
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from paceline.config.run import RunConfig
from paceline.learner.checkpoint.load import load
from paceline.learner.checkpoint.state import trainables_of
from paceline.learner.distributed.mesh import (
    RankGroup,
    form_fsdp_mesh,
    form_rows_mesh,
)
from paceline.learner.distributed.ranks import Ranks
from paceline.learner.model.decoder import compiling
from paceline.learner.model.loading import as_fsdp, hugging_face_names
from paceline.learner.model.lora import adapter_names, with_adapters
from paceline.learner.train.state.learner import Learner
from paceline.weights import corrections
from support import image_ranks, image_rows
from support.architectures import tiny_config
from support.learner_fakes import VOCAB_SIZE, run_config
from support.learner_ranks import WAIT_S
from support.learner_scenarios import numbers, save, take_step

NUM_PROMPTS = 4
NUM_STEPS = 3
MESHES: dict[str, dict[str, int]] = {
    "one copy": {},
    "2 copies": {"fsdp_size": 2},
    "4 copies": {"fsdp_size": 1},
    "context 2": {"context": 2},
    "context 2, 2 copies": {"context": 2, "fsdp_size": 2},
    "context 4": {"context": 4},
    "context 4, 2 copies": {"context": 4, "fsdp_size": 2},
    "experts 2": {"expert": 2},
    "experts 4": {"expert": 4},
    "experts 2, 2 copies": {"expert": 2, "fsdp_size": 2},
    "experts 2, context 2": {"expert": 2, "context": 2},
    "tensor 2": {"tensor": 2},
    "tensor 4": {"tensor": 4},
    "tensor 2, 2 copies": {"tensor": 2, "fsdp_size": 2},
    "tensor 2, experts 2": {"tensor": 2, "expert": 2},
}
"""Of four ranks, by name: sizes for `learner.context_parallel`, `fsdp_size` and so on."""

IMAGES_KIND = "qwen3_vl"
"""Each rank adds the tower's states to its own tokens in the first decoder layers, too."""

VARIANTS: dict[str, tuple[str, dict[str, dict[str, Any]]]] = {
    "windows": ("qwen2", {"actor": {"shared_prompts": "off"}}),
    "shared prompts": ("qwen2", {"actor": {"shared_prompts": "on"}}),
    "adapters": ("qwen3_moe", {"model": {"lora": {"rank": 3, "alpha": 6.0}}}),
    "experts": ("qwen3_moe", {"actor": {"shared_prompts": "on", "load_balance_coef": 0.1}}),
    "corrections": ("glm4_moe", {"actor": {"router_bias_update_rate": 0.01}}),
    "replay": ("qwen3_moe", {"actor": {"shared_prompts": "on", "router_replay": True, "use_kl_loss": True}}),
    "teacher": (
        "qwen2",
        {
            "algorithm": {"teacher": {"address": "http://nowhere/v1", "model": "big", "top_k": 5}},
            "actor": {"shared_prompts": "on", "policy_loss": {"type": "distill", "kl": "jsd"}},
        },
    ),
    "images": (
        IMAGES_KIND,
        {
            "data": {"train_batch_size": len(image_rows.PROMPTS), "max_prompt_length": 48},
            "algorithm": image_ranks.GROUPS,
            "rollout": {"n": image_ranks.SAMPLES},
            "actor": {"ppo_mini_batch_size": 3, "ppo_max_token_len_per_gpu": 160},
        },
    ),
    "compiled": ("qwen2", {"actor": {"shared_prompts": "on", "compile": True}}),
    "compiled experts": (
        "qwen3_moe",
        {"actor": {"shared_prompts": "on", "load_balance_coef": 0.1, "compile": True}},
    ),
    "lean": (
        "qwen2",
        {"actor": {"memory": {"accumulate": False, "keep_gathered": False, "offload": True}}},
    ),
}
"""By name, the kind of model and sections of the configuration. All but "images" have a critic."""


def remeshed(ranks: Ranks, mesh: str) -> Ranks:
    """The same ranks on one of `MESHES`; every rank calls it."""
    sizes = MESHES[mesh]
    fsdp_size, tensor = sizes.get("fsdp_size"), sizes.get("tensor", 1)
    context, timeout = sizes.get("context", tensor), datetime.timedelta(seconds=WAIT_S)
    divided = {name: sizes.get(name, 1) for name in ("expert", "tensor")}
    views = {
        name: form_fsdp_mesh("cpu", fsdp_size, timeout, **{name: size}) if size > 1 else None
        for name, size in divided.items()
    }
    rows = form_rows_mesh("cpu", context, timeout)
    return replace(
        ranks,
        data=RankGroup.of(rows.get_group("data")),
        context=RankGroup.of(rows.get_group("context")) if context > 1 else None,
        fsdp=form_fsdp_mesh("cpu", fsdp_size, timeout),
        experts=views["expert"],
        tensors=views["tensor"],
    )


def write_models(folder: Path) -> Path:
    """A tiny model of each kind that `VARIANTS` names, of two key heads, in a folder of its kind."""
    from transformers import AutoModelForCausalLM

    for kind in {kind for kind, _ in VARIANTS.values()}:
        if kind == IMAGES_KIND:
            image_rows.write_tiny_vl(folder / kind, kind=kind)
            continue
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(tiny_config(kind, vocab_size=VOCAB_SIZE))
        model.save_pretrained(folder / kind)
    return folder


def config_of(ranks: Ranks, models: Path, variant: str) -> RunConfig:
    """The run of a variant on a mesh, with budgets that give every mesh the same micro-batches."""
    context = 1 if ranks.context is None else ranks.context.size
    kind, sections = VARIANTS[variant]
    # With AdamW's own epsilon, rounding in a gradient that is 0 by symmetry would move a key's bias.
    optim = {"lr": 1e-3, "eps": 1e-3}
    actor = {"ppo_mini_batch_size": NUM_PROMPTS // 2, "ppo_max_token_len_per_gpu": 64, "optim": optim}
    actor |= sections.get("actor", {})
    actor["ppo_max_token_len_per_gpu"] //= context
    if ranks.world.size == 1:
        actor["compile"] = False  # compiled layers are compared with those that are not
    expert = 1 if ranks.experts is None else ranks.experts.size(-1)
    tensor = 1 if ranks.tensors is None else ranks.tensors.size(-1)
    sizes = {
        "world_size": ranks.world.size,
        "context_parallel": context,
        "expert_parallel": expert,
        "tensor_parallel": tensor,
    }
    return run_config(
        models / kind,
        **{
            "data": {"train_batch_size": NUM_PROMPTS},
            "critic": {"optim": optim},
            **sections,
            "actor": actor,
            "learner": {"device": "cpu", "threads": 1, **sizes, "fsdp_size": ranks.fsdp.size(-1)},
        },
    )


def steps(
    ranks: Ranks, models: Path, variant: str, *, resume: str = "", checkpoint: str = ""
) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    """Metrics of all steps, and all parameters that train after them; compiled layers have torch's kernels.

    Args:
        ranks: on their mesh.
        models: as `write_models` writes them.
        variant: one of `VARIANTS`.
        resume: a checkpoint of step 1, after which to go on.
        checkpoint: where to write one after step 1.
    """
    with patch.object(compiling, "BACKEND", "eager"):
        learner = Learner.build(config_of(ranks, models, variant), ranks)
    metrics = []
    if resume:
        load(learner, Path(resume))
    for step in range(learner.version + 1, NUM_STEPS + 1):
        choices = (3, 4, 2) if variant == "replay" else None
        has_images = VARIANTS[variant][0] == IMAGES_KIND
        take = (
            image_ranks.take_image_step
            if has_images
            else partial(
                take_step, num_prompts=NUM_PROMPTS, choices=choices, teacher=5 * (variant == "teacher")
            )
        )
        taken = take(learner, step)
        metrics.append(numbers(taken))
        # Not again for other sizes, and not what ranks divide: 10 to 26 graphs, or else 35 and more.
        assert taken.metrics.get("perf/compilations", 0.0) <= (30 if step == 1 else 0), taken.metrics
        if checkpoint and step == 1:
            save(learner, Path(checkpoint), step=1)
    return metrics, parameters_of(learner)


def parameters_of(learner: Learner) -> dict[str, Tensor]:
    """All parameters that change, and a model with merged adapters, unsharded."""
    parameters = dict[str, Tensor]()
    for kind, trainable in trainables_of(learner).items():
        network: Any = trainable.network
        as_fsdp(network).reshard()
        has_adapters = bool(adapter_names(network))
        with with_adapters(network):
            for name, parameter in hugging_face_names(network):
                if parameter.requires_grad or has_adapters or name.endswith(corrections.PARTS):
                    parameters[f"{kind}.{name}"] = full(parameter.detach())
    return parameters


def full(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def against_one_rank(ranks: Ranks, models: Path, expected: Path, variant: str, **options: str) -> Any:
    """Metrics, and the parameters' largest difference from those in the folder `expected`.

    A difference is a share of the largest number of its tensor.
    """
    metrics, parameters = steps(ranks, models, variant, **options)
    others = torch.load(expected / f"{variant}.pt", weights_only=True)
    assert list(parameters) == list(others)
    difference = max(share(parameters[name], others[name]) for name in others)
    return {"metrics": metrics, "difference": difference}


def share(ours: Tensor, others: Tensor) -> float:
    """Of the largest number, or of 0.01: biases begin at 0 and are at 0.004 after two steps."""
    return float((ours - others).abs().max() / others.abs().max().clamp_min(0.01))
