"""Packed rows with images against transformers' own forward pass, a row at a time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText

from paceline.config.load import dump_yaml
from paceline.core.errors import ModelError
from paceline.learner.batch.halve import Halves
from paceline.learner.batch.pack import pack
from paceline.learner.batch.types import MicroBatch, TrainingBatch
from paceline.learner.distributed.publisher import WeightPublisher
from paceline.learner.distributed.ranks import Ranks
from paceline.learner.export import export
from paceline.learner.model import loading
from paceline.learner.model.architectures import require_text_alone
from paceline.learner.model.decoder.layers import LayerOptions
from paceline.learner.model.image_states import vision_tower
from paceline.learner.model.loading import Precision, load_critic, load_policy
from paceline.learner.model.networks import body_of
from paceline.rollout.engines.weights.checkpoint import learner_shapes
from support.image_ranks import SAMPLES, build, full_tensors, on_policy_log_probs, steps, take_image_step
from support.image_rows import image_rows, reference_log_probs, reference_positions, write_tiny_vl
from support.learner_fakes import write_model
from support.learner_ranks import run_ranks
from support.learner_scenarios import save
from support.more import more

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("ranks")]

CPU = torch.device("cpu")
FLOAT32 = Precision(compute=torch.float32)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Models with a head of their own and one that is tied to the embeddings, and with DeepStack."""
    kinds = [("qwen2_5_vl", False), ("qwen2_5_vl", True), ("qwen3_vl", False)]
    return [
        write_tiny_vl(tmp_path_factory.mktemp("model"), kind=kind, seed=5, tie_word_embeddings=is_tied)
        for kind, is_tied in kinds
    ]


@pytest.fixture(scope="module", params=[0, *more(1), 2], ids=["own head", "tied head", "DeepStack"])
def number(request: pytest.FixtureRequest) -> int:
    """The model's, among `folders`."""
    return int(request.param)


@pytest.fixture(scope="module")
def folder(folders: list[Path], number: int) -> Path:
    return folders[number]


@pytest.fixture(scope="module")
def on_two_ranks(folders: list[Path]) -> list[Any]:
    """What two processes make of `image_ranks.everything`; both say the same."""
    first, second = run_ranks("support.image_ranks:everything", 2, *map(str, folders))
    assert first == second
    return list(first)


def hugging_face(folder: Path) -> Any:
    model: Any = AutoModelForImageTextToText.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    )
    model.model.visual.requires_grad_(False)
    return model


def run(network: Any, batch: MicroBatch, temperature: float = 1.0) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probs, and gradients of their weighted sum."""
    log_probs = network(batch, temperature).log_probs
    flat = batch.table(log_probs)[batch.mask]
    (flat * torch.linspace(-1, 1, len(flat))).sum().backward()
    gradients = {
        name: parameter.grad.full_tensor().clone()
        for name, parameter in loading.hugging_face_names(network)
        if parameter.grad is not None
    }
    network.zero_grad(set_to_none=True)
    return flat.detach(), gradients


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, gradient in ours.items():
        torch.testing.assert_close(gradient, theirs[name], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_and_gradients_are_those_of_each_row_alone(
    folder: Path, ranks: Ranks, temperature: float
) -> None:
    rows, reference = image_rows(), hugging_face(folder)
    expected = torch.cat([reference_log_probs(reference, row, temperature) for row in rows])
    (expected * torch.linspace(-1, 1, len(expected))).sum().backward()
    log_probs, gradients = run(load_policy(folder, ranks, FLOAT32), pack(rows, CPU), temperature)
    assert log_probs.tolist() == pytest.approx(expected.tolist(), abs=1e-5)
    trained = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
    assert_same(gradients, trained)
    assert not any("visual" in name for name in gradients)


def test_an_image_changes_the_log_probs_of_its_row_alone(folder: Path, ranks: Ranks) -> None:
    rows, network = image_rows(), load_policy(folder, ranks, FLOAT32)
    other = replace(rows[1].images[0], pixels=-rows[1].images[0].pixels, hash="f" * 64)
    changed = [rows[0], replace(rows[1], images=(other,)), *rows[2:]]
    with torch.no_grad():
        before, after = (network(pack(part, CPU))[0] for part in (rows, changed))
    first = len(rows[0].response_token_ids)
    stop = first + len(rows[1].response_token_ids)
    moved = (before - after).abs()
    assert float(moved[first:stop].min()) > 1e-3
    assert float(torch.cat([moved[:first], moved[stop:]]).max()) < 1e-6


def test_positions_are_those_of_transformers(folder: Path) -> None:
    rows, reference = image_rows(), hugging_face(folder)
    expected = torch.cat([reference_positions(reference, row) for row in rows], dim=1)
    positions = pack(rows, CPU).position_ids
    assert positions.shape == (3, 1, expected.shape[1])
    assert torch.equal(positions[:, 0], expected)
    # (1, 4, 6) patches are 2 x 3 tokens behind four of text; the text behind them goes on at 4 + 3.
    assert pack(rows[1:2], CPU).position_ids[:, 0, 3:11].tolist() == [
        [3, 4, 4, 4, 4, 4, 4, 7],
        [3, 4, 4, 4, 5, 5, 5, 7],
        [3, 4, 5, 6, 4, 5, 6, 7],
    ]


def test_rows_without_images_are_packed_as_ever() -> None:
    batch = pack([row for row in image_rows() if not row.images], CPU)
    assert batch.images is None
    assert batch.position_ids.shape == (1, batch.input_ids.shape[1])


def test_equal_images_are_in_a_micro_batch_once() -> None:
    rows = image_rows(samples=3)
    images = pack(rows, CPU).images
    assert images is not None
    distinct = {image.hash: image for row in rows for image in row.images}
    assert len(images.grids) == len(distinct) == 7
    assert len(images.pixels) == sum(len(image.pixels) for image in distinct.values())
    assert len(images.places) == sum(image.num_tokens for row in rows for image in row.images)


@pytest.mark.parametrize("share_prompts", [False, True])
def test_the_tower_computes_an_image_once_however_many_rows_have_it(
    folder: Path, ranks: Ranks, *, share_prompts: bool
) -> None:
    """To the bit as if every row had images of its own."""
    rows, network = image_rows(samples=3), load_policy(folder, ranks, FLOAT32)
    own = [
        replace(row, images=tuple(replace(image, hash=f"{row.index}{image.hash}") for image in row.images))
        for row in rows
    ]
    computed, tower = list[int](), vision_tower(body_of(network.lm))
    assert tower is not None
    hook = tower.register_forward_pre_hook(lambda _, args: computed.append(len(args[0])))
    log_probs, gradients = run(network, pack(rows, CPU, share_prompts=share_prompts))
    repeated, repeated_gradients = run(network, pack(own, CPU))
    hook.remove()
    once = sum(image.grid[1] * image.grid[2] for row in rows[::3] for image in row.images)
    assert computed == [once, 3 * once]
    if share_prompts:
        assert log_probs.tolist() == pytest.approx(repeated.tolist(), abs=1e-5)
        assert_same(gradients, repeated_gradients)
        return
    assert torch.equal(log_probs, repeated)
    assert gradients.keys() == repeated_gradients.keys()
    assert all(torch.equal(gradients[name], repeated_gradients[name]) for name in gradients)


def test_on_a_gpu_the_towers_convolution_is_computed_in_float32(on_two_ranks: list[Any], number: int) -> None:
    """As far as a machine without one can see: cuDNN's switch for TF32 in the tower's forward pass."""
    assert on_two_ranks[number][1] == [False]


def test_samples_of_a_group_can_share_a_prompt_with_images(folder: Path, ranks: Ranks) -> None:
    rows, network = image_rows(samples=3), load_policy(folder, ranks, FLOAT32)
    shared = pack(rows, CPU, share_prompts=True)
    plain = pack(rows, CPU)
    assert shared.input_ids.shape[1] < plain.input_ids.shape[1]
    expected, expected_gradients = run(network, plain)
    log_probs, gradients = run(network, shared)
    assert log_probs.tolist() == pytest.approx(expected.tolist(), abs=1e-5)
    assert_same(gradients, expected_gradients)


def test_prompts_that_differ_in_their_images_alone_are_not_shared() -> None:
    row = image_rows()[1]
    other = replace(row, index=9, images=(replace(row.images[0], hash="f" * 64),))
    assert len(pack([row, other], CPU, share_prompts=True).packed.blocks) == 1
    assert len(pack([row, replace(row, index=9)], CPU, share_prompts=True).packed.blocks) == 2


@pytest.mark.parametrize(
    "options", [LayerOptions(kept_share=0.0), LayerOptions(kept_share=0.5)], ids=["recomputed", "half"]
)
def test_recomputed_layers_change_no_number(folder: Path, ranks: Ranks, options: LayerOptions) -> None:
    batch = pack(image_rows(), CPU)
    expected, expected_gradients = run(load_policy(folder, ranks, FLOAT32), batch)
    log_probs, gradients = run(load_policy(folder, ranks, FLOAT32, options=options), batch)
    assert torch.equal(log_probs, expected)
    assert_same(gradients, expected_gradients)


def test_tokens_that_fill_a_multiple_change_no_number(folder: Path, ranks: Ranks) -> None:
    network, batch = load_policy(folder, ranks, FLOAT32), pack(image_rows(), CPU)
    expected, _ = run(network, batch)
    network.token_multiple = batch.input_ids.shape[1] + 5
    assert run(network, batch)[0].tolist() == pytest.approx(expected.tolist(), abs=1e-6)


def test_a_model_without_a_tower_refuses_images(ranks: Ranks, tmp_path: Path) -> None:
    network = load_policy(write_model(tmp_path, vocab_size=96), ranks, FLOAT32)
    with pytest.raises(ModelError, match="Qwen2Model has no vision tower, and a prompt has images"):
        network(pack(image_rows(), CPU))


def test_the_tower_is_loaded_and_frozen(folder: Path, ranks: Ranks) -> None:
    reference = dict(hugging_face(folder).named_parameters())
    parameters = dict(loading.hugging_face_names(load_policy(folder, ranks, FLOAT32)))
    assert parameters.keys() == reference.keys()
    for name, parameter in parameters.items():
        assert parameter.requires_grad == ("visual" not in name)
        assert torch.equal(parameter.full_tensor(), reference[name]), name  # type: ignore[attr-defined]


def test_the_first_mini_batch_is_exactly_on_policy(folder: Path, ranks: Ranks) -> None:
    """Scored beforehand, in the step that audits the ratio."""
    for share_prompts in ("off", "on"):
        learner = build(ranks, folder, actor={"shared_prompts": share_prompts})
        for step in (1, 2):
            rows = on_policy_log_probs(learner, image_rows(samples=SAMPLES, seed=step))
            metrics = take_image_step(learner, step, rows).metrics
            assert metrics["actor/first_ppo_kl"] == 0.0
            assert metrics["actor/first_pg_clipfrac"] == 0.0
            assert metrics["actor/ppo_kl"] != 0.0
            assert metrics["rollout/logprob_diff_max"] < 1e-5
            assert metrics["actor/skipped_updates"] == 0


def test_training_moves_all_of_the_language_model_and_none_of_the_tower(folder: Path, ranks: Ranks) -> None:
    learner = build(ranks, folder)
    before = full_tensors(learner)
    take_image_step(learner, 1)
    for name, tensor in full_tensors(learner).items():
        assert torch.equal(tensor, before[name]) == ("visual" in name), name
    assert not any("visual" in name for name in learner.actor.optimizer.state())


def test_a_step_does_not_depend_on_the_number_of_ranks(
    folder: Path, ranks: Ranks, on_two_ranks: list[Any], number: int
) -> None:
    """In the second step no rank but one has an image."""
    single = steps(ranks, str(folder))
    for ours, theirs in zip(single, on_two_ranks[number][0], strict=True):
        assert ours.keys() == theirs.keys()
        for name, value in ours.items():
            assert theirs[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


def test_a_checkpoint_without_the_tower_is_exported_with_it(
    folder: Path, ranks: Ranks, tmp_path: Path
) -> None:
    learner = build(ranks, folder, model={"dtype": "float32", "path": str(folder)})
    take_image_step(learner, 1)
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    save(learner, tmp_path / "run" / "checkpoints" / "step_000001", step=1)
    (tmp_path / "run" / "config.resolved.yaml").write_text(dump_yaml(learner.config), encoding="utf-8")
    export(tmp_path / "run", 1, tmp_path / "out")
    exported, started = (dict(hugging_face(path).named_parameters()) for path in (tmp_path / "out", folder))
    trained = full_tensors(learner)
    assert exported.keys() == started.keys() == trained.keys()
    for name, tensor in exported.items():
        assert torch.equal(tensor, trained[name]), name
        assert torch.equal(tensor, started[name]) == ("visual" in name), name


def test_adapters_leave_the_tower_alone(folder: Path, ranks: Ranks, tmp_path: Path) -> None:
    learner = build(ranks, folder, model={"lora": {"rank": 2, "alpha": 4.0}, "path": str(folder)})
    metrics = take_image_step(learner, 1).metrics
    assert metrics["actor/first_ppo_kl"] == 0.0
    assert metrics["actor/grad_norm"] > 0
    assert all("language_model.layers" in name for name in learner.actor.optimizer.state())


def test_values_see_the_images_as_log_probs_do(folder: Path, ranks: Ranks) -> None:
    critic, rows = load_critic(folder, ranks, FLOAT32, seed=7), image_rows()
    with torch.no_grad():
        together = critic(pack(rows, CPU))
        alone = torch.cat([critic(pack([row], CPU)) for row in rows])
        blind = critic(pack([replace(row, images=()) for row in rows], CPU))
    torch.testing.assert_close(together, alone, atol=1e-6, rtol=1e-5)
    assert float((together - blind).abs().max()) > 1e-3


def test_a_reward_model_is_not_made_of_it(folder: Path) -> None:
    with pytest.raises(ModelError, match=r"qwen\w+_vl takes images, too"):
        require_text_alone(loading.read_config(folder))


def test_a_folder_that_lacks_a_tensor_of_the_tower_is_refused(
    folder: Path, ranks: Ranks, tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    norm = next(
        name for name in tensors if name.endswith(("merger.ln_q.weight", "visual.merger.norm.weight"))
    )
    del tensors[norm]
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"no tensor 'model\.visual\.merger\.(ln_q|norm)\.weight'"):
        load_policy(tmp_path, ranks, FLOAT32)


def test_halves_of_a_micro_batch_have_the_images_of_their_rows(folder: Path, ranks: Ranks) -> None:
    """What an update that ran out of memory goes on with."""
    network, batch = load_policy(folder, ranks, FLOAT32), pack(image_rows(samples=2), CPU)
    halves = Halves.of(bare(batch)).halves
    assert [half.batch.images is not None for half in halves] == [True, True]
    with torch.no_grad():
        expected = batch.table(network(batch)[0])[batch.mask]
        parts = [half.batch for half in halves]
        own = torch.cat([part.table(network(part)[0])[part.mask] for part in parts])
    torch.testing.assert_close(own, expected, atol=1e-5, rtol=1e-5)


def bare(batch: MicroBatch) -> TrainingBatch:
    """A micro-batch as an update takes it, its numbers zeros."""
    return TrainingBatch(
        batch=batch,
        log_probs={},
        values=None,
        scores=torch.zeros(len(batch.rows)),
        group_ids=torch.zeros(len(batch.rows), dtype=torch.int64),
        advantages=torch.zeros(batch.mask.shape),
        returns=None,
        weights=None,
    )


def test_a_push_describes_the_tower_too(folder: Path, ranks: Ranks) -> None:
    """An engine that slept has lost it."""
    network = load_policy(folder, ranks, FLOAT32)
    lm: Any = network.lm
    layout = WeightPublisher(lm, CPU).layout()
    shapes = {part.name: part.global_shape for part in layout.slices}
    tied = {"lm_head.weight"} if lm.config.get_text_config().tie_word_embeddings else set()
    expected = {name: tuple(parameter.shape) for name, parameter in hugging_face(folder).named_parameters()}
    assert shapes == {name: shape for name, shape in expected.items() if name not in tied}
    assert learner_shapes(lm.config) == expected


def test_bfloat16_computes_the_tower_too(folder: Path, ranks: Ranks) -> None:
    batch = pack(image_rows(), CPU)
    with torch.no_grad():
        exact = load_policy(folder, ranks, FLOAT32)(batch)[0]
    network = load_policy(folder, ranks, Precision(compute=torch.bfloat16))
    dtypes = []
    tower: Any = vision_tower(body_of(network.lm))
    tower.merger.register_forward_hook(lambda module, given, made: dtypes.append(made.dtype))
    log_probs = network(batch)[0]
    log_probs.sum().backward()
    assert dtypes == [torch.bfloat16]
    assert 0 < float((log_probs.detach() - exact).abs().mean()) < 0.05
    assert all((p.grad is None) == ("visual" in n) for n, p in loading.hugging_face_names(network))
