"""A vision tower that trains: its gradients, optimizer steps, checkpoints and exports."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForImageTextToText

from paceline.config.load import dump_yaml
from paceline.config.training.algorithm import REFERENCE
from paceline.core.errors import CheckpointError, ModelError
from paceline.core.policy import TrainedVision
from paceline.learner.batch.pack import pack
from paceline.learner.batch.types import PackedRow
from paceline.learner.checkpoint.load import load
from paceline.learner.distributed.ranks import Ranks
from paceline.learner.export import export
from paceline.learner.model import loading
from paceline.learner.model.decoder.layers import LayerOptions
from paceline.learner.model.image_states import vision_tower
from paceline.learner.model.loading import Precision, as_fsdp, load_policy
from paceline.learner.model.networks import PolicyNetwork, body_of
from paceline.learner.train.state.learner import Learner
from support.architectures import tiny_config
from support.image_ranks import (
    SAMPLES,
    build,
    full_tensors,
    on_policy_log_probs,
    steps,
    take_image_step,
)
from support.image_rows import image_rows, reference_log_probs, write_tiny_vl
from support.learner_fakes import write_model
from support.learner_ranks import run_ranks
from support.learner_scenarios import save
from support.more import more

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("ranks")]

CPU = torch.device("cpu")
FLOAT32 = Precision(compute=torch.float32)
TOWER = "model.visual."
PROJECTORS = (TOWER + "merger.", TOWER + "deepstack_merger_list.")
KINDS = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5")
VOCAB = 96
NUM_COLOUR_STEPS = 30
WHOLE: dict[str, Any] = {"vision": {"train": "all"}}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model of each kind, made when it is asked for."""

    class Folders(dict[str, Path]):
        def __missing__(self, kind: str) -> Path:
            self[kind] = write_tiny_vl(tmp_path_factory.mktemp(kind), kind=kind, seed=5)
            return self[kind]

    return Folders()


@pytest.fixture(scope="module", params=KINDS[:2])
def folder(request: pytest.FixtureRequest, folders: dict[str, Path]) -> Path:
    return folders[request.param]


def policy(folder: Path, ranks: Ranks, vision: TrainedVision = "all", **options: Any) -> PolicyNetwork:
    return load_policy(folder, ranks, FLOAT32, options=LayerOptions(**options), vision=vision)


def run(network: PolicyNetwork, rows: list[PackedRow], *, share_prompts: bool = False) -> dict[str, Tensor]:
    """Gradients of a weighted sum of the log-probs."""
    batch = pack(rows, CPU, share_prompts=share_prompts)
    flat = batch.table(network(batch).log_probs)[batch.mask]
    (flat * torch.linspace(-1, 1, len(flat))).sum().backward()
    parameters: list[tuple[str, Any]] = list(loading.hugging_face_names(network))
    gradients = {name: p.grad.full_tensor().clone() for name, p in parameters if p.grad is not None}
    network.zero_grad(set_to_none=True)
    return gradients


def exact_gradients(folder: Path, rows: list[PackedRow]) -> dict[str, Tensor]:
    """The same by transformers' own forward pass in float64, a row at a time."""
    lm: Any = AutoModelForImageTextToText.from_pretrained(
        folder, attn_implementation="eager", experts_implementation="eager", dtype=torch.float64
    )
    flat = torch.cat([reference_log_probs(lm, row) for row in rows])
    assert flat.dtype == torch.float64
    (flat * torch.linspace(-1, 1, len(flat), dtype=torch.float64)).sum().backward()
    return {name: p.grad for name, p in lm.named_parameters() if p.grad is not None}


def assert_close(ours: dict[str, Tensor], theirs: dict[str, Tensor], tolerance: float) -> None:
    assert ours.keys() == theirs.keys()
    largest = max(float(gradient.norm()) for gradient in theirs.values())
    for name, gradient in ours.items():
        error, norm = float((gradient.double() - theirs[name]).norm()), float(theirs[name].norm())
        # Keys' biases have no gradient: they add the same to all scores of a query.
        assert error < tolerance * max(norm, 1e-4 * largest), (name, error, norm)


@pytest.mark.parametrize("kind", [*KINDS[:2], *more(*KINDS[2:])])
def test_gradients_are_those_of_float64(ranks: Ranks, folders: dict[str, Path], kind: str) -> None:
    """Prompts of none, one and several images; answers of a prompt that share it add up."""
    folder, rows = folders[kind], image_rows(samples=2, config=tiny_config(kind))
    expected = exact_gradients(folder, rows)
    assert any(name.startswith(TOWER) for name in expected)
    tolerance = 1e-4 if kind == "qwen3_5" else 1e-5  # a state's decay rounds more
    assert_close(run(policy(folder, ranks), rows), expected, tolerance)
    recomputing = policy(folder, ranks, kept_share=0.5)
    blocks: Any = vision_tower(body_of(recomputing.lm))
    assert [block.gradient_checkpointing for block in blocks.blocks] == [True, False]
    assert_close(run(recomputing, rows, share_prompts=kind != "qwen3_5"), expected, tolerance)


def test_only_the_projector_trains_if_only_it_shall(folder: Path, ranks: Ranks) -> None:
    rows, seen = image_rows(), list[bool]()
    recomputing = policy(folder, ranks, "projector", kept_share=0.5)
    tower: Any = vision_tower(body_of(recomputing.lm))
    tower.blocks[0].register_forward_hook(lambda module, given, made: seen.append(made.requires_grad))
    of_all, of_projector = run(policy(folder, ranks), rows), run(recomputing, rows)
    assert seen == [False], "a gradient goes through what is frozen"
    rest = {name for name in of_all if name.startswith(TOWER) and not name.startswith(PROJECTORS)}
    assert len(rest) > 20
    assert of_projector.keys() == of_all.keys() - rest
    for name, gradient in of_projector.items():
        torch.testing.assert_close(gradient, of_all[name], atol=1e-6, rtol=1e-5)
    assert all(float(of_projector[n].norm()) > 0 for n in of_projector if n.startswith(PROJECTORS))


@pytest.mark.parametrize("part", ["all", "projector"])
def test_without_images_the_tower_has_gradients_of_zero(
    folder: Path, ranks: Ranks, part: TrainedVision
) -> None:
    """FSDP needs one on every rank; the numbers are those of a frozen tower to the bit."""
    rows = [row for row in image_rows() if not row.images]
    network, frozen = policy(folder, ranks, part), policy(folder, ranks, "none")
    log_probs = [net(pack(rows, CPU)).log_probs.detach() for net in (network, frozen)]
    assert torch.equal(*log_probs)
    gradients, expected = run(network, rows), run(frozen, rows)
    trained = {n for n, p in loading.hugging_face_names(network) if p.requires_grad and TOWER in n}
    assert gradients.keys() == expected.keys() | trained
    for name, gradient in gradients.items():
        assert torch.equal(gradient, expected.get(name, torch.zeros_like(gradient))), name


def test_scoring_runs_the_tower_as_the_update_does(folder: Path, ranks: Ranks) -> None:
    """With a graph: attention on a GPU chooses its kernel by that."""
    network, batch, seen = policy(folder, ranks), pack(image_rows(), CPU), list[bool]()
    tower: Any = vision_tower(body_of(network.lm))
    tower.blocks[0].register_forward_hook(lambda module, given, made: seen.append(made.requires_grad))
    with torch.no_grad():
        scored = network(batch).log_probs
    assert not scored.requires_grad
    assert torch.equal(scored, network(batch).log_probs.detach())
    assert seen == [True, True]


def test_a_step_trains_the_tower_and_not_the_references(folder: Path, ranks: Ranks) -> None:
    learner = build(ranks, folder, model=WHOLE, actor={"use_kl_loss": True, "shared_prompts": "on"})
    started, reference = full_tensors(learner), learner.frozen[REFERENCE].network
    kls, own = [], list[Tensor]()
    for step in (1, 2):
        rows = on_policy_log_probs(learner, image_rows(samples=SAMPLES, seed=step))
        metrics = take_image_step(learner, step, rows).metrics
        assert metrics["actor/first_ppo_kl"] == metrics["actor/first_pg_clipfrac"] == 0.0
        assert metrics["actor/skipped_updates"] == 0
        assert metrics["rollout/logprob_diff_max"] < 1e-5
        kls.append(metrics["algorithm/reference_kl"])
        with torch.no_grad():
            own.append(reference(pack(image_rows(), CPU)).log_probs)
    assert abs(kls[0]) < 1e-9 < kls[1]
    assert torch.equal(*own)
    for name, tensor in full_tensors(learner).items():
        assert not torch.equal(tensor, started[name]), name
    as_fsdp(reference).reshard()
    for name, parameter in loading.hugging_face_names(reference):
        stored: Any = parameter
        assert torch.equal(stored.full_tensor(), started[name]), name


@pytest.mark.parametrize("world_size", [2, *more(3)])
def test_ranks_without_an_image_wait_for_nothing(
    ranks: Ranks, folders: dict[str, Path], world_size: int
) -> None:
    """In the second step, images are on one rank only; two ranks share the tokens of rows, or the rows."""
    kinds = KINDS[:2]
    models = [str(folders[kind]) for kind in kinds]
    results = run_ranks("support.image_ranks:trained_steps", world_size, *models, timeout_s=300)
    assert all(result == results[0] for result in results)
    assert_same_steps(ranks, models, results[0])


@pytest.mark.more
def test_ranks_that_share_the_tokens_of_rows_train_the_tower_alike(
    ranks: Ranks, folders: dict[str, Path]
) -> None:
    models = [str(folders[kind]) for kind in KINDS[:2]]
    results = run_ranks("support.image_ranks:trained_steps", 2, *models, context=2, timeout_s=300)
    assert_same_steps(ranks, models, results[0])


def assert_same_steps(ranks: Ranks, models: list[str], results: list[list[dict[str, float]]]) -> None:
    for model, several in zip(models, results, strict=True):
        for ours, theirs in zip(steps(ranks, model, "all"), several, strict=True):
            assert ours.keys() == theirs.keys()
            for name, value in ours.items():
                assert theirs[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize(
    "actor",
    [
        {"optim": {"lr": 1e-3, "type": "adamw_8bit"}},
        {"optim": {"lr": 1e-3, "type": "muon"}},
        {"memory": {"offload": True}},
    ],
    ids=["8 bits", "Muon", "host"],
)
def test_every_optimizer_moves_all_of_the_tower(
    folders: dict[str, Path], ranks: Ranks, actor: dict[str, Any]
) -> None:
    learner = build(ranks, folders["qwen3_vl"], model=WHOLE, actor=actor)
    started = full_tensors(learner)
    assert take_image_step(learner, 1).metrics["actor/skipped_updates"] == 0
    for name, tensor in full_tensors(learner).items():
        assert not torch.equal(tensor, started[name]), name


def write_run(learner: Learner, folder: Path) -> Path:
    """A run's folder with a checkpoint of its first step."""
    (folder / "checkpoints").mkdir(parents=True)
    save(learner, folder / "checkpoints" / "step_000001", step=1)
    (folder / "config.resolved.yaml").write_text(dump_yaml(learner.config), encoding="utf-8")
    return folder / "checkpoints" / "step_000001"


@pytest.mark.parametrize("part", ["all", "projector"])
def test_a_run_goes_on_from_its_checkpoint_and_is_exported_with_its_tower(
    folder: Path, ranks: Ranks, tmp_path: Path, part: str
) -> None:
    model = {"dtype": "float32", "path": str(folder), "vision": {"train": part}}
    first = build(ranks, folder, model=model)
    started = full_tensors(first)
    take_image_step(first, 1)
    checkpoint, trained = write_run(first, tmp_path / "run"), full_tensors(first)
    second = build(ranks, folder, model=model)
    load(second, str(checkpoint))
    results = [take_image_step(learner, 2).metrics for learner in (first, second)]
    assert results[0]["actor/grad_norm"] == results[1]["actor/grad_norm"]
    for name, tensor in full_tensors(first).items():
        assert torch.equal(tensor, full_tensors(second)[name]), name
    export(tmp_path / "run", 1, tmp_path / "out")
    exported: Any = AutoModelForImageTextToText.from_pretrained(tmp_path / "out", dtype=torch.float32)
    frozen = set[str]()
    for name, parameter in exported.named_parameters():
        assert torch.equal(parameter, trained[name]), name
        if torch.equal(parameter, started[name]):
            frozen.add(name)
    tower = {name for name in trained if name.startswith(TOWER)}
    assert frozen == (set() if part == "all" else {n for n in tower if not n.startswith(PROJECTORS)})


def test_a_checkpoint_of_another_trained_part_is_refused(
    folders: dict[str, Path], ranks: Ranks, tmp_path: Path
) -> None:
    folder = folders["qwen3_vl"]
    learner = build(ranks, folder, model=WHOLE)
    take_image_step(learner, 1)
    checkpoint = write_run(learner, tmp_path / "run")
    other = build(ranks, folder, model={"vision": {"train": "projector"}})
    with pytest.raises(CheckpointError, match=r"was written with model\.vision\.train: all; now it is proj"):
        load(other, str(checkpoint))


def test_a_model_without_a_tower_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"model\.vision\.train is all, and Qwen2Model has no vision tower"):
        policy(write_model(tmp_path), ranks)


def test_a_critics_tower_stays_frozen(folders: dict[str, Path], ranks: Ranks) -> None:
    algorithm = {"adv_estimator": "gae", "use_kl_in_reward": False, "kl_ctrl": {"type": "fixed"}}
    learner = build(ranks, folders["qwen3_vl"], model=WHOLE, algorithm=algorithm)
    critic = learner.critic
    assert critic is not None
    metrics = take_image_step(learner, 1).metrics
    assert metrics["actor/first_ppo_kl"] == 0.0
    assert metrics["critic/grad_norm"] > 0
    assert {name for name, p in critic.network.named_parameters() if not p.requires_grad} == {
        name for name, _ in critic.network.named_parameters() if "visual." in name
    }


def colour_rows(network: PolicyNetwork, step: int) -> tuple[list[PackedRow], list[float], float]:
    """Samples of one token each for pictures of two colours: low tokens are right for one, high ones for the
    other. Prompts differ in nothing else.

    Returns rows and rewards, and the probability of a right answer.
    """
    rng, rows, rewards, chances = np.random.default_rng([3, step]), [], [], []
    [row] = image_rows([(1, (1, 4, 4), 1)], config=tiny_config("qwen3_vl"))
    for number in range(6):
        is_low = number % 2 == 0
        image = replace(
            row.images[0], pixels=np.full_like(row.images[0].pixels, 1 - 2 * is_low), hash=f"{is_low}"
        )
        answer = {
            "response_mask": np.ones(1, np.uint8),
            "response_log_probs": np.zeros(1, np.float32),
            "images": (image,),
        }
        every = [
            replace(row, response_token_ids=np.full(1, token, np.int32), **answer) for token in range(VOCAB)
        ]
        with torch.no_grad():
            log_probs = network(pack(every, CPU, share_prompts=True)).log_probs.double().numpy()
        right = (np.arange(VOCAB) < VOCAB // 2) == is_low
        chances.append(float(np.exp(log_probs)[right].sum()))
        for token in rng.choice(VOCAB, SAMPLES, p=np.exp(log_probs) / np.exp(log_probs).sum()):
            drawn = np.array([log_probs[token]], np.float32)
            rows.append(replace(every[token], index=len(rows), response_log_probs=drawn))
            rewards.append(float(right[token]))
    return rows, rewards, float(np.mean(chances))


@pytest.mark.more
def test_a_blind_tower_learns_to_see_if_it_trains(ranks: Ranks, tmp_path: Path) -> None:
    """Frozen, it cannot tell the pictures apart, and half of the answers are right at best."""
    model = write_tiny_vl(tmp_path, kind="qwen3_vl", seed=5)
    tensors = load_file(model / "model.safetensors")
    [name] = [name for name in tensors if name.endswith("patch_embed.proj.weight")]
    tensors[name].zero_()
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    chances = {}
    for part in ("none", "all"):
        learner = build(ranks, model, model={"vision": {"train": part}}, actor={"optim": {"lr": 1e-2}})
        for step in range(1, NUM_COLOUR_STEPS + 1):
            rows, rewards, _ = colour_rows(learner.actor.network, step)
            take_image_step(learner, step, rows, rewards)
        chances[part] = colour_rows(learner.actor.network, 0)[2]
    assert chances["none"] < 0.501
    assert chances["all"] > 0.9
