"""What the learner's meshes of four ranks are and compute; `run_ranks` calls a function in each of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from paceline.learner.distributed.host_memory import local_part, sharded_like
from paceline.learner.distributed.mesh import RankGroup
from paceline.learner.distributed.publisher import WeightPublisher
from paceline.learner.distributed.ranks import Ranks
from paceline.learner.model.loading import Precision, load_policy
from paceline.learner.train.state.compact_averages import compacted
from support import context_ranks, expert_ranks, memory_faults, tensor_ranks
from support.mesh_steps import VARIANTS, against_one_rank, remeshed

EVERY_TIME = (
    ("2 copies", "shared prompts"),
    ("context 2, 2 copies", "adapters"),
    ("context 4, 2 copies", "experts"),
    ("context 2, 2 copies", "replay"),
    ("context 2, 2 copies", "teacher"),
    ("experts 2", "experts"),
    ("experts 2, context 2", "adapters"),
    ("experts 4", "replay"),
    ("tensor 2", "shared prompts"),
    ("tensor 4", "adapters"),
)
"""Meshes and variants that `make test` compares with one rank."""
GRID = (
    ("4 copies", "lean"),
    ("context 4", "windows"),
    ("context 2", "images"),
    ("context 4, 2 copies", "corrections"),
    ("experts 2, 2 copies", "experts"),
    ("experts 2, context 2", "corrections"),
    ("experts 4", "experts"),
    ("tensor 2", "images"),
    ("tensor 2, 2 copies", "windows"),
    ("tensor 2, experts 2", "experts"),
    ("tensor 2, experts 2", "corrections"),
    ("context 4", "compiled"),
    ("tensor 2", "compiled"),
    ("experts 2, context 2", "compiled experts"),
)
"""What `make test-more` compares beside them; with these there is each mesh and each variant."""

VARIANT, EXPERTS = "shared prompts", "experts"
"""Of the resumed runs"""
WRITERS = (("2 copies", VARIANT), ("experts 2", EXPERTS), ("tensor 2", VARIANT))
"""Meshes and variants that write a checkpoint after the first step"""


def groups(ranks: Ranks) -> dict[str, Any]:
    """By dimension: this rank's place and what it gets of the ranks' numbers 1, 10, 100, ..."""
    named = {"world": ranks.world, "data": ranks.data, "context": ranks.context}
    for name in ranks.fsdp.mesh_dim_names or ():
        named[name] = RankGroup.of(ranks.fsdp.get_group(name))
    number = torch.tensor([10**ranks.world.rank])
    return {name: seen(group, number) for name, group in named.items() if group is not None}


def seen(group: RankGroup, number: torch.Tensor) -> dict[str, Any]:
    backend: Any = group.process_group._get_backend(torch.device("cpu"))
    return {
        "rank": group.rank,
        "size": group.size,
        "sum": int(group.all_sum(number)),
        "max": int(group.all_max(number)),
        "all": group.all_gather(number).tolist(),
        "timeout_s": backend.options._timeout.total_seconds(),
    }


def shards(ranks: Ranks, model: Path) -> dict[str, Any]:
    """By parameter: the rows that the publisher says this rank has, whether they and copies are the same."""
    from transformers import AutoModelForCausalLM

    stored = AutoModelForCausalLM.from_pretrained(model).state_dict()
    network = load_policy(model, ranks, Precision(compute=torch.float32))
    layout = WeightPublisher(network.lm, ranks.device).layout()
    parameters = dict(network.lm.named_parameters())
    said = {}
    for part in layout.slices:
        parameter = parameters[part.name].detach()
        copy = sharded_like(parameter, local_part(parameter).clone())
        same = torch.equal(copy.full_tensor(), parameter.full_tensor())  # type: ignore[operator]
        same = same and torch.equal(local_part(parameter), stored[part.name][part.box.slices])
        said[part.name] = [part.box.start[0], part.box.stop[0], same and has_codes_of_one_rank(parameter)]
    return said


def has_codes_of_one_rank(parameter: torch.Tensor) -> bool:
    """Whether what ranks make of their rows in 8 bits is together what one rank makes of all rows."""
    if parameter.ndim == 1:
        return True
    parts = compacted(local_part(parameter), signed=True)
    together = [sharded_like(parameter, part).full_tensor() for part in parts]  # type: ignore[operator]
    alone = compacted(parameter.full_tensor(), signed=True)  # type: ignore[operator]
    return all(map(torch.equal, together, alone))


def every_time(ranks: Ranks, models: str, expected: str, checkpoints: str, small: str) -> dict[str, Any]:
    """What `make test` looks at, in one set of processes, which begins on the mesh "context 2, 2 copies"."""
    begun, meshes = groups(ranks), {mesh: remeshed(ranks, mesh) for mesh in ("one copy", "context 4")}
    copies = remeshed(ranks, "2 copies")
    return {
        "groups": {"begun": begun, **{mesh: groups(other) for mesh, other in meshes.items()}},
        "shards": shards(copies, Path(models, VARIANTS[VARIANT][0])),
        "shards of experts": shards(remeshed(ranks, "experts 2"), Path(models, VARIANTS[EXPERTS][0])),
        "shards of matrices": shards(remeshed(ranks, "tensor 2"), Path(models, VARIANTS[VARIANT][0])),
        "experts": expert_ranks.differences(ranks.world),
        "collectives": {
            name: context_ranks.collectives(group)
            for name, group in (("2", ranks.context), ("4", meshes["context 4"].context))
            if group is not None
        },
        "steps": compared(ranks, EVERY_TIME, models, expected, checkpoints),
        "resumed": against_one_rank(
            remeshed(ranks, "context 2"),
            Path(models),
            Path(expected),
            VARIANT,
            resume=f"{checkpoints}/by 2 copies",
        ),
        "resumed experts": against_one_rank(
            remeshed(ranks, "experts 4"),
            Path(models),
            Path(expected),
            EXPERTS,
            resume=f"{checkpoints}/{EXPERTS} by one rank",
        ),
        "out of memory, shared rows": memory_faults.ranks_that_share_rows(
            remeshed(ranks, "context 2"), "experts", str(Path(models, VARIANTS["experts"][0]))
        ),
        "out of memory, divided experts": memory_faults.ranks_that_share_rows(
            remeshed(ranks, "experts 2"), "divided experts", str(Path(models, VARIANTS["experts"][0]))
        ),
        "out of memory, recomputed experts": memory_faults.ranks_that_share_rows(
            remeshed(ranks, "experts 2"),
            "divided experts, recomputed",
            str(Path(models, VARIANTS["experts"][0])),
        ),
        "resumed matrices": against_one_rank(
            remeshed(ranks, "tensor 4"),
            Path(models),
            Path(expected),
            VARIANT,
            resume=f"{checkpoints}/by tensor 2",
        ),
    }


def grid(ranks: Ranks, models: str, expected: str, checkpoints: str, small: str) -> dict[str, Any]:
    """What `make test-more` looks at beside that."""
    memory = {"recompute": "full", "keep_gathered": True, "accumulate": False}
    actor = {"memory": memory, "ppo_max_token_len_per_gpu": 48}  # several micro-batches for each rank
    return {
        "steps": compared(ranks, GRID, models, expected, checkpoints),
        "out of memory, divided matrices": memory_faults.ranks_that_share_rows(
            remeshed(ranks, "tensor 2"), "dense", small
        ),
        "out of memory, compiled experts": memory_faults.ranks_that_share_rows(
            remeshed(ranks, "experts 2, context 2"),
            "compiled experts",
            str(Path(models, VARIANTS["experts"][0])),
        ),
        "families": tensor_ranks.families(ranks, f"{models}/families"),
        "resumed": against_one_rank(
            remeshed(ranks, "4 copies"),
            Path(models),
            Path(expected),
            VARIANT,
            resume=f"{checkpoints}/{VARIANT} by one rank",
        ),
        "out of memory": memory_faults.one_rank_runs_out(
            remeshed(ranks, "2 copies"), small, memory_faults.PLACES[-1], with_third=False, **actor
        ),
        "out of memory, shared rows": memory_faults.ranks_that_share_rows(
            remeshed(ranks, "context 2"), "dense", small
        ),
        "out of memory, recomputed experts": memory_faults.ranks_that_share_rows(
            remeshed(ranks, "experts 2, context 2"),
            "divided experts, recomputed",
            str(Path(models, VARIANTS["experts"][0])),
        ),
    }


def compared(
    ranks: Ranks, cases: Sequence[tuple[str, str]], models: str, expected: str, checkpoints: str
) -> dict[str, Any]:
    """By mesh and variant, steps against one rank's; `WRITERS` write a checkpoint."""
    outcomes = {}
    for mesh, variant in cases:
        writes = {"checkpoint": f"{checkpoints}/by {mesh}"} if (mesh, variant) in WRITERS else {}
        outcomes[f"{mesh}: {variant}"] = against_one_rank(
            remeshed(ranks, mesh), Path(models), Path(expected), variant, **writes
        )
    return outcomes
