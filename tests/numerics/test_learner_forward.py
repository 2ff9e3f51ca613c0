"""The packed forward pass against Hugging Face's own, one sequence at a time, and the loading of weights."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.core.errors import ModelError
from paceline.learner.batch.pack import pack
from paceline.learner.batch.padded import PaddedSequences
from paceline.learner.batch.types import MicroBatch, PackedRow, PackedSequences
from paceline.learner.distributed.ranks import Ranks
from paceline.learner.model import loading
from paceline.learner.model import networks as models
from paceline.learner.model.decoder import attention
from paceline.learner.model.decoder.attention import packed_attention
from paceline.learner.model.decoder.layers import LayerOptions
from paceline.learner.model.loading import Precision, as_fsdp, draw_normal, load_critic, load_policy
from support.learner_fakes import VOCAB_SIZE, write_model

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("ranks")]

CPU = torch.device("cpu")
FLOAT32 = Precision(compute=torch.float32)
LENGTHS = [(3, 1), (1, 4), (9, 2), (5, 6), (5, 6), (12, 8)]


@pytest.fixture(scope="module", params=[False, True], ids=["own head", "tied head"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), tied=request.param, seed=5)


def make_rows() -> list[PackedRow]:
    rng = np.random.default_rng(4)
    return [
        PackedRow(
            index=index,
            prompt_token_ids=rng.integers(2, VOCAB_SIZE, prompt).astype(np.int32),
            response_token_ids=rng.integers(2, VOCAB_SIZE, response).astype(np.int32),
            response_mask=np.ones(response, np.uint8),
            response_log_probs=np.full(response, -index, np.float32),
        )
        for index, (prompt, response) in enumerate(LENGTHS)
    ]


def reference(folder: Path, rows: list[PackedRow], temperature: float) -> tuple[list[Tensor], Any]:
    """Log-probs of the responses by an eager forward pass of each sequence alone, and the model."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    log_probs = []
    for row in rows:
        ids = torch.from_numpy(
            np.concatenate([row.prompt_token_ids, row.response_token_ids]).astype(np.int64)
        )
        logits = model(ids[None]).logits[0] / temperature
        start = len(row.prompt_token_ids)
        scores = logits[start - 1 : -1].log_softmax(-1)
        log_probs.append(scores.gather(-1, ids[start:, None]).squeeze(-1))
    return log_probs, model


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(
    "max_elements", [models.MAX_LOGITS_ELEMENTS["cpu"], 5 * VOCAB_SIZE], ids=["at_once", "chunked"]
)
def test_log_probs_and_gradients_are_those_of_each_sequence_alone(
    folder: Path, ranks: Ranks, temperature: float, max_elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(models.MAX_LOGITS_ELEMENTS, "cpu", max_elements)
    rows = make_rows()
    expected, hugging_face = reference(folder, rows, temperature)
    batch = pack(rows, CPU)
    network = load_policy(folder, ranks, FLOAT32)
    log_probs, entropy, _ = network(batch, temperature, True)
    assert log_probs.tolist() == pytest.approx(torch.cat(expected).tolist(), abs=1e-5)
    assert entropy is not None
    uncertainty = entropy.detach()
    assert 0 < float(uncertainty.min()) < float(uncertainty.max()) <= float(np.log(VOCAB_SIZE))

    weights = torch.linspace(-1, 1, len(log_probs))
    (log_probs * weights).sum().backward()
    (torch.cat(expected) * weights).sum().backward()
    reference_parameters = dict(hugging_face.named_parameters())
    parameters = dict(loading.hugging_face_names(network))
    assert parameters.keys() == reference_parameters.keys()
    for name, parameter in parameters.items():
        assert parameter.grad is not None, name
        torch.testing.assert_close(
            parameter.grad.full_tensor(), reference_parameters[name].grad, atol=2e-5, rtol=1e-4
        )


@pytest.mark.parametrize("share_prompts", [False, True])
def test_a_segment_is_a_sequence_of_its_own(folder: Path, ranks: Ranks, share_prompts: bool) -> None:
    """Numbers and gradients of a row with segments are those of its segments as rows."""
    first, second, third, other = [make_rows()[index] for index in (4, 2, 5, 5)]
    parts = [first.response_token_ids]
    for row in (second, third):
        parts += [row.prompt_token_ids, row.response_token_ids]
    starts = (len(parts[0]), len(parts[0]) + len(parts[1]) + len(parts[2]))
    mask = np.concatenate([np.full(len(part), place % 2 == 0, np.uint8) for place, part in enumerate(parts)])
    joined = PackedRow(
        index=0,
        prompt_token_ids=first.prompt_token_ids,
        response_token_ids=np.concatenate(parts),
        response_mask=mask,
        response_log_probs=np.zeros(len(mask), np.float32),
        segment_starts=starts,
    )
    lengths = [len(first.prompt_token_ids) + starts[0], starts[1] - starts[0], len(mask) - starts[1]]
    positions = [place for length in lengths for place in range(length)]
    assert pack([joined], CPU).position_ids.tolist() == [positions]
    # A second row with the first one's prompt, so that prompts can be shared.
    twin = PackedRow(**{**fields(other), "index": 1, "prompt_token_ids": first.prompt_token_ids})
    network = load_policy(folder, ranks, FLOAT32)

    def run(rows: list[PackedRow], shared: bool) -> tuple[Tensor, list[Tensor]]:
        batch = pack(rows, CPU, share_prompts=shared)
        log_probs = network(batch, 1.0).log_probs
        sampled = batch.table(log_probs)[batch.mask]
        (sampled * torch.linspace(-1, 1, len(sampled))).sum().backward()
        gradients = [parameter.grad.full_tensor().clone() for parameter in network.parameters()]
        network.zero_grad()
        return sampled.detach(), gradients

    expected, expected_gradients = run([first, second, third, twin], False)
    numbers, gradients = run([joined, twin], share_prompts)
    assert numbers.tolist() == pytest.approx(expected.tolist(), abs=1e-5)
    for ours, theirs in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-4)


def test_gradient_checkpointing_changes_no_gradient(folder: Path, ranks: Ranks) -> None:
    batch = pack(make_rows(), CPU)
    gradients = []
    for share, expected in ((1.0, [False, False]), (0.5, [True, False]), (0.0, [True, True])):
        network = load_policy(folder, ranks, FLOAT32, options=LayerOptions(kept_share=share))
        layers = models.decoder_layers(models.body_of(network.lm))
        assert [layer.gradient_checkpointing for layer in layers] == expected
        network(batch)[0].sum().backward()
        gradients.append([parameter.grad.full_tensor() for parameter in network.parameters()])
    for plain, *recomputed in zip(*gradients, strict=True):
        for gradient in recomputed:
            torch.testing.assert_close(plain, gradient, atol=1e-6, rtol=1e-6)


def test_values_are_the_head_of_the_state_before_each_token(folder: Path, ranks: Ranks) -> None:
    from transformers import AutoModel

    rows = make_rows()
    critic = load_critic(folder, ranks, FLOAT32, seed=7)
    values = critic(pack(rows, CPU))
    body = AutoModel.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    head = draw_normal(torch.Size([1, 24]), loading.VALUE_HEAD_STD, 7, "value_head.weight")
    expected = []
    for row in rows:
        ids = torch.from_numpy(
            np.concatenate([row.prompt_token_ids, row.response_token_ids]).astype(np.int64)
        )
        states = body(ids[None]).last_hidden_state[0][len(row.prompt_token_ids) - 1 : -1]
        expected.append((states @ head.t()).squeeze(-1))
    assert values.tolist() == pytest.approx(torch.cat(expected).tolist(), abs=1e-6)
    assert max(map(abs, values.tolist())) > 1e-3
    with torch.no_grad():
        other = load_critic(folder, ranks, FLOAT32, seed=8)(pack(rows, CPU))
    assert not torch.equal(other, values)


def test_a_reward_model_gives_the_critic_its_score(folder: Path, ranks: Ranks, tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    torch.manual_seed(1)
    reward_model = AutoModelForSequenceClassification.from_pretrained(
        folder, num_labels=1, dtype=torch.float32
    )
    reward_model.save_pretrained(tmp_path)
    rows = make_rows()
    with torch.no_grad():
        values = load_critic(tmp_path, ranks, FLOAT32, seed=7)(pack(rows, CPU))
        expected = []
        for row in rows:
            tokens = np.concatenate([row.prompt_token_ids, row.response_token_ids]).astype(np.int64)
            states = reward_model.model(torch.from_numpy(tokens)[None]).last_hidden_state[0]
            expected.append(reward_model.score(states)[len(row.prompt_token_ids) - 1 : -1, 0])
    torch.testing.assert_close(values, torch.cat(expected), atol=1e-5, rtol=1e-5)
    two = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=2, dtype=torch.float32)
    two.save_pretrained(tmp_path / "two")
    with pytest.raises(ModelError, match=r"'score.weight' has shape \(2, 24\), the model needs \(1, 24\)"):
        load_critic(tmp_path / "two", ranks, FLOAT32, seed=7)


@pytest.mark.parametrize("window", [None, 3])
def test_attention_sees_its_own_sequence_only(window: int | None) -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = [2, 5, 5, 7]
    query = torch.randn(1, 4, sum(lengths), 8, generator=generator)
    key, value = (torch.randn(1, 2, sum(lengths), 8, generator=generator) for _ in range(2))
    packed = PackedSequences.of(lengths, CPU)
    assert [(b.start, b.num_sequences, b.length) for b in packed.blocks] == [(0, 1, 2), (2, 2, 5), (12, 1, 7)]
    out, weights = packed_attention(
        torch.nn.Identity(), query, key, value, None, packed=packed, scaling=0.3, sliding_window=window
    )
    assert weights is None
    expected, start = [], 0
    for length in lengths:
        q, k, v = (x[:, :, start : start + length] for x in (query, key, value))
        k, v = (x.repeat_interleave(2, dim=1) for x in (k, v))
        distance = torch.arange(length)[:, None] - torch.arange(length)[None]
        seen = (distance >= 0) & (distance < (window or length))
        scores = (q @ k.transpose(-1, -2) * 0.3).masked_fill(~seen, -torch.inf)
        expected.append((F.softmax(scores, -1) @ v).transpose(1, 2))
        start += length
    torch.testing.assert_close(out, torch.cat(expected, 1), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("most_scores", [attention.SLICE_SCORES, 60])
def test_attention_with_a_softcap_and_sinks_by_its_formula(
    window: int | None, with_sinks: bool, most_scores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """60 scores: two queries of the longest two sequences at a time."""
    monkeypatch.setattr(attention, "SLICE_SCORES", most_scores)
    generator = torch.Generator().manual_seed(1)
    lengths = [2, 5, 5]
    query = torch.randn(1, 4, 12, 8, generator=generator)
    key, value = (torch.randn(1, 2, 12, 8, generator=generator) for _ in range(2))
    sinks = torch.randn(4, generator=generator) if with_sinks else None
    inputs = [x.requires_grad_() for x in (query, key, value, sinks) if x is not None]
    packed = PackedSequences.of(lengths, CPU)
    layer = torch.nn.Identity()
    out, _ = packed_attention(
        layer,
        query,
        key,
        value,
        None,
        packed=packed,
        scaling=0.3,
        sliding_window=window,
        softcap=0.5,
        s_aux=sinks,
    )
    expected, start = [], 0
    for length in lengths:
        q, k, v = (x[0, :, start : start + length].double() for x in (query, key, value))
        k, v = (x.repeat_interleave(2, dim=0) for x in (k, v))
        distance = torch.arange(length)[:, None] - torch.arange(length)[None]
        seen = (distance >= 0) & (distance < (window or length))
        weights = torch.exp(0.5 * torch.tanh(0.3 * q @ k.transpose(-1, -2) / 0.5)) * seen
        total = weights.sum(-1, keepdim=True)
        if sinks is not None:
            total = total + sinks.double().exp()[:, None, None]
        expected.append((weights / total @ v).transpose(0, 1))
        start += length
    true = torch.cat(expected)
    torch.testing.assert_close(out[0].double(), true, atol=1e-6, rtol=1e-5)
    slope = torch.randn(out[0].shape, generator=generator)
    gradients = [
        torch.autograd.grad(numbers, inputs, at) for numbers, at in ((out[0], slope), (true, slope.double()))
    ]
    for own, expected_one in zip(*gradients, strict=True):
        torch.testing.assert_close(own, expected_one, atol=1e-5, rtol=1e-4)


class LargestNumbers(TorchDispatchMode):
    """Notes how many floating-point numbers the largest result of an operation has."""

    most = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.is_floating_point():
            self.most = max(self.most, out.numel())
        return out


def test_scores_with_a_softcap_are_never_there_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of Gemma 2 would take 8 GiB a layer at 8,192 tokens; here 4 x 100 x 100 are 40,000."""
    monkeypatch.setattr(attention, "SLICE_SCORES", 8000)
    query = torch.randn(1, 4, 100, 4, requires_grad=True)
    key, value = (torch.randn(1, 2, 100, 4, requires_grad=True) for _ in range(2))
    kept: list[int] = []
    packed = PackedSequences.of([100], CPU)
    with (
        LargestNumbers() as largest,
        torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x),
    ):
        out, _ = packed_attention(
            torch.nn.Identity(), query, key, value, None, packed=packed, scaling=0.3, softcap=0.5
        )
        out.sum().backward()
    assert 4000 < largest.most <= 8000
    assert sum(kept) < 80_000  # of all scores alone several tables would be kept


def test_attention_with_dropout_or_without_the_sequences_is_refused() -> None:
    x = torch.zeros(1, 2, 3, 4)
    packed = PackedSequences.of([3], CPU)
    with pytest.raises(ModelError, match="Identity asks for attention with dropout"):
        packed_attention(torch.nn.Identity(), x, x, x, None, packed=packed, dropout=0.1)
    with pytest.raises(ModelError, match="Identity's model does not tell its layers"):
        packed_attention(torch.nn.Identity(), x, x, x, None)


def test_sequences_are_padded_once_for_all_layers_and_not_kept_with_the_micro_batch(
    folder: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FSDP copies dataclasses and lists before every layer; where sequences begin reaches all as it is."""
    padded: list[PaddedSequences] = []
    honest = PaddedSequences.of
    monkeypatch.setattr(PaddedSequences, "of", lambda *given: padded.append(honest(*given)) or padded[-1])
    network, batch = load_policy(folder, ranks, FLOAT32), pack(make_rows(), CPU)
    for number in (1, 2):
        with torch.no_grad():
            network(batch)
        assert len(padded) == number


def test_a_micro_batch_by_hand() -> None:
    rows = make_rows()[:2]
    batch = pack(rows, CPU)
    assert batch.input_ids.shape == (1, 9)
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 0, 1, 2, 3, 4]]
    assert batch.packed.cu_seqlens.tolist() == [0, 4, 9]
    # The first response token is scored at the prompt's last position.
    assert batch.score_positions.tolist() == [2, 4, 5, 6, 7]
    assert batch.targets.tolist() == [*rows[0].response_token_ids, *rows[1].response_token_ids]
    assert batch.mask.tolist() == [[True, False, False, False], [True] * 4]
    assert batch.table(torch.tensor([1.0, 2, 3, 4, 5])).tolist() == [[1, 0, 0, 0], [2, 3, 4, 5]]
    assert batch.rollout_log_probs.tolist() == [[0, 0, 0, 0], [-1, -1, -1, -1]]


def test_tool_tokens_are_scored_but_masked() -> None:
    row = make_rows()[3]
    holes = np.array([1, 0, 0, 1, 1, 1], np.uint8)
    batch = pack([PackedRow(**{**fields(row), "response_mask": holes})], CPU)
    assert batch.mask.tolist() == [[True, False, False, True, True, True]]
    assert len(batch.targets) == 6


def fields(row: PackedRow) -> dict[str, Any]:
    return {name: getattr(row, name) for name in PackedRow.__slots__}


def test_a_filler_counts_for_nothing(folder: Path, ranks: Ranks) -> None:
    batch: MicroBatch = pack([], CPU)
    assert (batch.rows, batch.mask.tolist()) == ((), [[False]])
    network = load_policy(folder, ranks, FLOAT32)
    (batch.table(network(batch)[0]).where(batch.mask, 0.0).sum()).backward()
    assert all(float(p.grad.full_tensor().abs().max()) == 0 for p in network.parameters())


def test_random_weights_follow_from_seed_and_name_alone(folder: Path, ranks: Ranks) -> None:
    first, again, other = (
        {
            n: p.full_tensor().detach()
            for n, p in loading.hugging_face_names(load_policy(folder, ranks, FLOAT32, random_seed=s))
        }
        for s in (1, 1, 2)
    )
    weight = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(first[weight], again[weight])
    assert not torch.equal(first[weight], other[weight])
    assert float(first[weight].std()) == pytest.approx(0.2, rel=0.1)
    assert float(first["model.norm.weight"].min()) == 1.0


@pytest.mark.parametrize("seed", [None, 3], ids=["read", "drawn"])
def test_blocks_and_threads_change_no_weight(
    folder: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch, seed: int | None
) -> None:
    monkeypatch.setattr(loading, "BLOCK", 100)  # a few rows of each matrix, the last block is shorter
    threads: set[str] = set()
    fill = loading._fill_block

    def noted(*arguments: Any) -> None:
        threads.add(threading.current_thread().name.rpartition("_")[0])
        fill(*arguments)

    monkeypatch.setattr(loading, "_fill_block", noted)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        network = load_policy(folder, ranks, FLOAT32, random_seed=seed)
        assert (threads, torch.get_num_threads()) == ({"weights"}, 3)
    finally:
        torch.set_num_threads(before)
    stored = dict(loading.stored_tensors(folder, seed))
    loaded = {name: p.full_tensor().detach() for name, p in loading.hugging_face_names(network)}
    assert loaded.keys() == stored.keys()
    assert all(torch.equal(loaded[name], stored[name].float()) for name in loaded)


def test_a_rank_draws_its_rows_as_the_whole_tensor_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "BLOCK", 60)  # four rows of 13 numbers
    rows = loading._Seed(1, 0.1).rows("model.w", torch.Size([30, 13]))
    drawn = rows(0, 30)
    assert torch.equal(torch.cat([rows(0, 7), rows(7, 8), rows(8, 25), rows(25, 30)]), drawn)
    assert len({float(number) for number in drawn[:, 0]}) == 30  # no block repeats another
    assert torch.equal(drawn[:4], draw_normal(torch.Size([4, 13]), 0.1, 1, "model.w"))


def test_a_tensor_that_cannot_be_read_ends_the_loading(
    folder: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreadable(self: Any, name: str, shape: torch.Size) -> Any:
        raise ModelError(f"no {name}")

    def rows(self: Any, name: str, shape: torch.Size) -> Any:
        known(self, name, shape)
        return lambda start, stop: unreadable(self, name, shape)

    known = loading.ModelFiles.rows
    before = torch.get_num_threads()
    monkeypatch.setattr(loading.ModelFiles, "rows", rows)
    with pytest.raises(ModelError, match="no model"):
        load_policy(folder, ranks, FLOAT32)
    assert torch.get_num_threads() == before


def test_half_precision_computes_in_bfloat16_over_float32_masters(folder: Path, ranks: Ranks) -> None:
    rows = make_rows()
    with torch.no_grad():
        exact = load_policy(folder, ranks, FLOAT32)(pack(rows, CPU))[0]
        half = load_policy(folder, ranks, Precision(compute=torch.bfloat16))
        rough = half(pack(rows, CPU))[0]
    as_fsdp(half).reshard()
    assert rough.dtype == torch.float32
    assert {p.dtype for p in half.parameters()} == {torch.float32}
    assert 1e-5 < float((rough - exact).abs().max()) < 0.2


def test_folders_that_do_not_fit_are_refused_with_the_reason(
    folder: Path, ranks: Ranks, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=r"has no config.json; set model.path"):
        load_policy(tmp_path, ranks, FLOAT32)
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="has no safetensors weights"):
        load_policy(tmp_path, ranks, FLOAT32)
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3, "layer_types": None}))
    with pytest.raises(ModelError, match=r"no tensor 'model.layers.2.self_attn.q_proj.weight'"):
        load_policy(tmp_path, ranks, FLOAT32)
    (tmp_path / "config.json").write_text(json.dumps(config | {"intermediate_size": 40}))
    with pytest.raises(ModelError, match=r"shape \(41, 24\), the model needs \(40, 24\)"):
        load_policy(tmp_path, ranks, FLOAT32)
