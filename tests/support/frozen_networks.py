"""A run with a teacher of another shape than the policy, and what the teacher says by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from paceline.config.run import RunConfig
from paceline.learner.batch.blobs import fetch_rows
from paceline.learner.batch.pack import pack
from paceline.learner.distributed.ranks import Ranks
from paceline.learner.train.scoring import score
from paceline.learner.train.state.learner import Learner
from paceline.learner.train.stopwatch import Stopwatch
from support.architectures import tiny_config
from support.learner_fakes import POLICY, VOCAB_SIZE, DictBlobs, make_batch, run_config
from support.learner_scenarios import numbers, take_step

OWN: dict[str, Any] = {
    "adv_estimator": "grpo",
    "use_kl_in_reward": False,
    "kl_ctrl": {"type": "fixed", "kl_coef": 0.1},
}
"""The section of an algorithm without a critic."""

_CODE = """
from paceline.algorithms.algorithm import Algorithm
from paceline.algorithms.policy_losses import LossOutputs
from paceline.algorithms.rows import Estimates
from paceline.algorithms.statistics import masked_mean


def gap(rows):
    return Estimates(rows.log_probs["teacher"] - rows.log_probs["rollout"])


class Distil(Algorithm):
    networks = ("teacher",)

    def advantages(self, rows):
        return gap(rows)


class NeedsReference(Algorithm):
    networks = ("reference",)


def towards(inputs):
    gap = inputs.log_probs - inputs.log_probs_of["teacher"]
    return LossOutputs(gap**2, {"gap": masked_mean(gap.detach().abs(), inputs.mask)})
"""


def write_own(folder: Path) -> str:
    """A file with an estimator, algorithms and a loss that read a teacher; returns its path."""
    file = folder / "my_distillation.py"
    file.write_text(_CODE)
    return str(file)


def write_teacher(folder: Path, seed: int = 5, *, architecture: str = "qwen2") -> Path:
    """A model that is wider and deeper than the tests' policy, with a vocabulary that is padded larger."""
    from transformers import AutoModelForCausalLM

    sizes = {"vocab_size": VOCAB_SIZE + 16, "hidden_size": 32, "num_hidden_layers": 3}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        lm = AutoModelForCausalLM.from_config(tiny_config(architecture, dtype="float32", **sizes))
    lm.save_pretrained(folder)
    return folder


def with_teacher(
    model: Path | str,
    teacher: Path | str,
    own: str,
    *,
    temperature: float = 1.0,
    lora: dict[str, Any] | None = None,
    coach: Path | None = None,
    **actor: Any,
) -> RunConfig:
    """A run with a reference and a teacher, whose estimator reads the teacher, and perhaps a second one."""
    networks = {"teacher": str(teacher)} | ({} if coach is None else {"coach": str(coach)})
    return run_config(
        Path(model),
        model={"path": str(model), "lora": lora},
        algorithm={**OWN, "adv_estimator": f"{own}:gap", "networks": networks},
        actor={"use_kl_loss": True, "ppo_max_token_len_per_gpu": 128, "optim": {"lr": 1e-2}, **actor},
        rollout={"n": 4, "temperature": temperature},
    )


def log_probs_alone(folder: Path | str, temperature: float) -> list[list[float]]:
    """What transformers' own model, in float64, says of each row of `take_step`'s first batch."""
    from transformers import AutoModelForCausalLM

    lm = AutoModelForCausalLM.from_pretrained(
        str(folder), dtype=torch.float64, attn_implementation="eager"
    ).eval()
    tables = []
    for row in _packed_rows():
        prompt, response = (torch.tensor(ids, dtype=torch.long) for ids in row)
        with torch.no_grad():
            logits = lm(input_ids=torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1]
        log_probs = (logits / temperature).log_softmax(-1)
        tables.append(log_probs.gather(1, response[:, None])[:, 0].tolist())
    return tables


def scored_log_probs(learner: Learner) -> dict[str, list[list[float]]]:
    """By name, the log-probs of the same rows in order, from the learner's scoring on one rank."""
    rows, blobs = make_batch(step=1, seed=1)
    packed = fetch_rows(
        DictBlobs(blobs),
        dict(enumerate(rows)),
        range(len(rows)),
        policy=POLICY,
        vocab_size=learner.vocab_size,
    )
    batch = pack([packed[row] for row in range(len(rows))], learner.ranks.device)
    (scored,) = score(learner, [batch], Stopwatch(learner.ranks.device), without_old=[False])
    return {
        name: [line[kept].tolist() for line, kept in zip(table, batch.mask, strict=True)]
        for name, table in scored.log_probs.items()
    }


def on_ranks(ranks: Ranks, model: str, teacher: str, own: str) -> list[Any]:
    """A step's metrics and the teacher's log-probs of this rank's rows: on the device, in host memory."""
    return [_on_ranks(ranks, model, teacher, own, offload) for offload in (False, True)]


def _on_ranks(ranks: Ranks, model: str, teacher: str, own: str, offload: bool) -> list[Any]:
    from unittest import mock

    from paceline.learner.train import scoring

    tables: dict[str, list[float]] = {}
    honest = scoring.score

    def watched(*arguments: Any, **options: Any) -> Any:
        scored = honest(*arguments, **options)
        for part in scored:
            kept = zip(part.batch.rows, part.log_probs["teacher"], part.batch.mask, strict=False)
            tables.update({str(row): line[mask].tolist() for row, line, mask in kept})
        return scored

    config = with_teacher(model, teacher, own, memory={"offload_reference": offload})
    with mock.patch.object(scoring, "score", watched):
        metrics = numbers(take_step(Learner.build(config, ranks), 1))
    return [metrics, tables]


def _packed_rows() -> list[tuple[list[int], list[int]]]:
    from paceline.wire import decode_trajectory

    rows, blobs = make_batch(step=1, seed=1)
    trajectories = [decode_trajectory(blobs[row.blob_key]) for row in rows]
    return [(t.prompt_token_ids.tolist(), t.response_token_ids.tolist()) for t in trajectories]
