"""Samples that share a prompt's tokens: the numbers and gradients of samples with a copy each."""

from __future__ import annotations

import functools
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.core.errors import EnvironmentLackError, NumericsError
from paceline.learner.batch import padded
from paceline.learner.batch.pack import pack
from paceline.learner.batch.types import PackedRow, PackedSequences
from paceline.learner.distributed.ranks import Ranks
from paceline.learner.model.decoder import attention, flash_attention
from paceline.learner.model.decoder.rows import take_rows
from paceline.learner.model.loading import Precision, load_critic, load_policy
from paceline.learner.train.state import shared_prompts
from paceline.learner.train.state.learner import Learner
from support.learner_fakes import run_config
from support.learner_scenarios import numbers, take_step, train
from support.learner_shapes import rows_with_holes
from support.memory_faults import PLACES, out_of_memory

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("ranks")]

NUM_LAYERS = 2
CPU = torch.device("cpu")
GROUPS = [[(1, 3), (1, 1), (1, 3)], [(7, 2)], [(5, 1), (5, 6), (5, 6), (5, 4)]]
"""(prompt, response) tokens of each sample: a prompt of one token, a group of one, several lengths."""

groups = st.lists(
    st.tuples(st.integers(1, 9), st.lists(st.integers(1, 8), min_size=1, max_size=5)), min_size=1, max_size=4
)


def run(
    network: torch.nn.Module, rows: list[PackedRow], *, share_prompts: bool
) -> tuple[Tensor, list[Tensor]]:
    """Numbers of the response tokens, (n,), and the gradient of a weighted masked sum."""
    batch = pack(rows, CPU, share_prompts=share_prompts)
    output = network(batch)
    flat = output[0] if isinstance(output, tuple) else output
    table = batch.table(flat)
    weights = torch.linspace(-1, 1, table.numel(), dtype=table.dtype).reshape(table.shape)
    (table.where(batch.mask, 0.0) * weights).sum().backward()
    gradients = [parameter.grad.full_tensor().clone() for parameter in network.parameters()]
    network.zero_grad()
    return flat.detach(), gradients


def close(ours: list[Tensor], others: list[Tensor], tolerance: float) -> bool:
    """Whether no element differs by more than the tolerance, as a share of its tensor's largest."""
    return all(
        float((a.double() - b.double()).abs().max()) <= tolerance * max(1.0, float(b.abs().max()))
        for a, b in zip(ours, others, strict=True)
    )


def test_the_layout_by_hand() -> None:
    rows = rows_with_holes([[(3, 2), (3, 1)], [(2, 2)]])
    batch = pack(rows, CPU, share_prompts=True)
    # prompt prompt prompt | a a | b | prompt prompt c c
    parts = [rows[0].prompt_token_ids, rows[0].response_token_ids, rows[1].response_token_ids]
    parts += [rows[2].prompt_token_ids, rows[2].response_token_ids]
    assert batch.input_ids.tolist() == [[int(x) for part in parts for x in part]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 3, 0, 1, 2, 3]]
    assert batch.score_positions.tolist() == [2, 3, 2, 7, 8]
    assert batch.packed.cu_seqlens.tolist() == [0, 3, 5, 6, 10]
    keys = batch.packed.keys
    assert keys is not None
    assert keys.tokens.rows.tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 0, 1, 2, 5, 6, 7, 8, 9]
    assert (keys.cu_seqlens.tolist(), keys.max_length) == ([0, 3, 8, 12, 16], 5)
    plain = pack(rows, CPU)
    assert plain.packed.keys is None
    assert plain.input_ids.shape == (1, 13)
    for name in ("targets", "places", "mask", "rollout_log_probs"):
        assert torch.equal(getattr(batch, name), getattr(plain, name))


def test_only_neighbours_with_the_same_tokens_share() -> None:
    rows = rows_with_holes([[(3, 2)], [(3, 2)], [(3, 1)]])
    assert pack(rows, CPU, share_prompts=True).packed.keys is None


@pytest.mark.parametrize("kind", ["policy", "critic"])
def test_numbers_and_gradients_are_those_of_float64_without_sharing(
    model: Path, ranks: Ranks, kind: str
) -> None:
    def load(dtype: torch.dtype) -> torch.nn.Module:
        precision = Precision(compute=dtype, store=dtype)
        if kind == "critic":
            return load_critic(model, ranks, precision, seed=1)
        return load_policy(model, ranks, precision)

    rows = rows_with_holes(GROUPS)
    exact, exact_gradients = run(load(torch.float64), rows, share_prompts=False)
    network = load(torch.float32)
    plain, plain_gradients = run(network, rows, share_prompts=False)
    shared, shared_gradients = run(network, rows, share_prompts=True)
    assert close([shared], [exact], 1e-6)
    assert close([shared], [plain], 1e-6)
    assert close(shared_gradients, exact_gradients, 3e-6)
    # Rounding of the same size as in the unshared form.
    assert close(shared_gradients, plain_gradients, 3e-6)


@settings(max_examples=10, deadline=None)
@given(shape=groups, data=st.data())
def test_groups_that_micro_batches_cut_give_the_same_sums(
    shape: list[tuple[int, list[int]]], data: st.DataObject
) -> None:
    network = _TINY.get()
    rows = rows_with_holes([[(prompt, length) for length in lengths] for prompt, lengths in shape])
    first = data.draw(st.integers(0, len(rows)))
    parts = [part for part in (rows[:first], rows[first:]) if part]
    plain = [run(network, part, share_prompts=False) for part in parts]
    shared = [run(network, part, share_prompts=True) for part in parts]
    for (ours, our_gradients), (others, other_gradients) in zip(shared, plain, strict=True):
        assert close([ours], [others], 1e-12)
        assert close(our_gradients, other_gradients, 1e-6)  # FSDP reduces them in float32


class _TinyNetwork:
    """A float64 policy, loaded once: examples of hypothesis cannot use a function's fixture."""

    network: torch.nn.Module | None = None

    def get(self) -> torch.nn.Module:
        assert self.network is not None
        return self.network


_TINY = _TinyNetwork()


@pytest.fixture(autouse=True, scope="module")
def _tiny(model: Path, ranks: Ranks) -> None:
    precision = Precision(compute=torch.float64, store=torch.float64)
    _TINY.network = load_policy(model, ranks, precision)


@pytest.mark.parametrize("window", [None, 1, 4, 9])
@pytest.mark.parametrize("value_size", [8, 6, 10])
def test_attention_to_a_prefix_against_a_plain_softmax(
    window: int | None, value_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths, prefixes = [4, 3, 3, 1, 5], [None, 0, 0, 0, None]
    packed = PackedSequences.of(lengths, CPU, prefixes)
    assert [(b.num_sequences, b.prefix_length) for b in packed.blocks] == [(1, 0), (2, 4), (1, 4), (1, 0)]
    generator = torch.Generator().manual_seed(0)

    def draw(heads: int, size: int = 8) -> Tensor:
        return torch.randn(1, heads, sum(lengths), size, generator=generator, dtype=torch.float64)

    inputs = [draw(4).requires_grad_(), draw(2).requires_grad_(), draw(2, value_size).requires_grad_()]
    weights = draw(4, value_size).transpose(1, 2)
    expected, scoring = plain_attention(*inputs, packed, window), flash_attention.Scoring(window=window)
    reference = torch.autograd.grad((expected * weights).sum(), inputs)

    def in_batches() -> Tensor:
        module = torch.nn.Identity()
        return attention.packed_attention(module, *inputs, None, packed=packed, sliding_window=window)[0]

    def varlen() -> Tensor:
        q, k, v = (x[0].transpose(0, 1) for x in inputs)
        return attention._side_by_side(q, k, v, packed, scoring).unsqueeze(0)

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_by_hand)
    monkeypatch.setattr(flash_attention, "_chosen", ["torch"])

    def in_full() -> Tensor:
        q, k, v = (x[0].transpose(0, 1) for x in inputs)
        scores = functools.partial(attention._full_scores, softcap=None, sinks=None)
        return attention._in_batches(q, k, v, packed, scoring, scores).unsqueeze(0)

    for way in (in_batches, varlen, in_full):
        tolerance = 1e-6 if way is in_full else 1e-12  # its softmax is in float32
        out = way()
        torch.testing.assert_close(out, expected, atol=tolerance, rtol=tolerance)
        gradients = torch.autograd.grad((out * weights).sum(), inputs)
        for ours, other in zip(gradients, reference, strict=True):
            torch.testing.assert_close(ours, other, atol=tolerance, rtol=tolerance)


def plain_attention(q: Tensor, k: Tensor, v: Tensor, packed: PackedSequences, window: int | None) -> Tensor:
    """Sequence by sequence, from the blocks' description."""
    outputs = []
    for block in packed.blocks:
        for start in range(block.start, block.stop, block.length):
            places = [*range(block.prefix_start, block.prefix_start + block.prefix_length)]
            places += range(start, start + block.length)
            outputs.append(
                one_sequence(q[0, :, start : start + block.length], k[0][:, places], v[0][:, places], window)
            )
    return torch.cat(outputs, 1).transpose(0, 1).unsqueeze(0)


def one_sequence(q: Tensor, k: Tensor, v: Tensor, window: int | None, scale: float | None = None) -> Tensor:
    """(H, L, D) queries against (G, K, D) keys, aligned at the end."""
    k, v = (x.repeat_interleave(q.shape[0] // x.shape[0], dim=0) for x in (k, v))
    num_queries, num_keys = q.shape[1], k.shape[1]
    back = torch.arange(num_keys - num_queries, num_keys)[:, None] - torch.arange(num_keys)
    seen = (back >= 0) & (back < (window or num_keys))
    scores = q @ k.transpose(-1, -2) * (scale or q.shape[-1] ** -0.5)
    return scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v


def varlen_by_hand(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None,
    window_size: tuple[int, int],
    enable_gqa: bool = False,
) -> Tensor:
    """What torch.nn.attention.varlen computes on CUDA."""
    assert window_size[1] == 0
    assert q.shape[-1] == k.shape[-1] == v.shape[-1]
    assert q.shape[1] == k.shape[1] or enable_gqa
    assert int(cu_q.diff().max()) == max_q
    assert int(cu_k.diff().max()) == max_k
    window = None if window_size[0] < 0 else window_size[0] + 1
    outputs = []
    for i in range(len(cu_q) - 1):
        own, keys = slice(int(cu_q[i]), int(cu_q[i + 1])), slice(int(cu_k[i]), int(cu_k[i + 1]))
        sequence = (q[own].transpose(0, 1), k[keys].transpose(0, 1), v[keys].transpose(0, 1))
        outputs.append(one_sequence(*sequence, window, scale).transpose(0, 1))
    return torch.cat(outputs)


def test_gradients_of_rows_taken_often_are_summed_in_float32() -> None:
    rows = torch.zeros(2, 3, dtype=torch.bfloat16, requires_grad=True)
    index = torch.tensor([0, 1, *[0] * 255])
    take_rows(rows, index).sum().backward()
    assert rows.grad is not None
    # In bfloat16 a sum of ones would stop at 256 - but 257 rounds to 256, so count to 260 by fours.
    assert rows.grad.tolist() == [[256.0] * 3, [1.0] * 3]
    rows.grad = None
    small = torch.full((513, 3), 2.0**-9, dtype=torch.bfloat16)
    small[0] = 1.0
    take_rows(rows, torch.zeros(513, dtype=torch.int64)).backward(small)
    assert rows.grad.tolist() == [[2.0] * 3, [0.0] * 3]


def build(model: Path, ranks: Ranks, mode: str, notes: list[str] | None = None, **actor: Any) -> Learner:
    """A run with critic and reference, over which both passes share."""
    config = run_config(model, actor={"shared_prompts": mode, "ppo_max_token_len_per_gpu": 96, **actor})
    return Learner.build(config, ranks, [].append if notes is None else notes.append)


def test_steps_of_policy_critic_and_reference_have_the_same_numbers(model: Path, ranks: Ranks) -> None:
    plain = train(build(model, ranks, "off"), 1, 2)
    shared = train(build(model, ranks, "on"), 1, 2)
    for ours, others in zip(shared, plain, strict=True):
        assert ours == pytest.approx(others, rel=1e-4, abs=2e-6)
    learner = build(model, ranks, "on")
    result = take_step(learner, 1)
    assert result.metrics["timing_s/shared_prompts"] > 0
    assert "timing_s/shared_prompts" not in take_step(learner, 2).metrics  # checked once
    assert result.metrics["perf/computed_share"] < 0.6
    assert result.metrics["actor/first_ppo_kl"] == 0


def test_auto_shares_where_it_saves_enough(
    model: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes: list[str] = []
    assert take_step(build(model, ranks, "auto", notes), 1).metrics["perf/computed_share"] < 0.6
    monkeypatch.setattr(shared_prompts, "MIN_GAIN", 5.0)
    assert take_step(build(model, ranks, "auto", notes), 1).metrics["perf/computed_share"] == 1
    assert notes == []


def test_a_form_that_differs_is_left_with_a_note(
    model: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = numbers(take_step(build(model, ranks, "off"), 1))
    honest = padded.causal_mask

    def hiding(num_queries: int, num_keys: int, window: int | None, device: torch.device) -> Tensor:
        """A prompt that its responses do not see."""
        mask = honest(num_queries, num_keys, window, device)
        mask[:, : num_keys - num_queries] = False
        return mask

    monkeypatch.setattr(padded, "causal_mask", hiding)
    notes: list[str] = []
    learner = build(model, ranks, "auto", notes)
    assert numbers(take_step(learner, 1)) == expected
    take_step(learner, 2)
    assert len(notes) == 1
    assert "every sample keeps its own copy of its prompt" in notes[0]
    with pytest.raises(NumericsError, match=r"set actor\.shared_prompts=off"):
        take_step(build(model, ranks, "on"), 1)


@pytest.fixture(scope="module")
def without_sharing(model: Path, ranks: Ranks) -> list[dict[str, float]]:
    """The numbers of two steps in which every sample has its own copy of its prompt."""
    return train(build(model, ranks, "off"), 1, 2)


@pytest.mark.parametrize("passes", [{0}, {1}])
@pytest.mark.parametrize("place", PLACES[1:3])
def test_a_check_that_runs_out_of_memory_is_left_with_a_note(
    model: Path, ranks: Ranks, without_sharing: list[dict[str, float]], place: str, passes: set[int]
) -> None:
    notes: list[str] = []
    learner = build(model, ranks, "auto", notes)
    with out_of_memory(learner, place, passes):
        steps = [numbers(take_step(learner, 1))]
    assert [*steps, numbers(take_step(learner, 2))] == without_sharing
    (note,) = notes
    assert note == (
        "the check of shared prompts ran out of memory on 1 rank(s); every sample keeps its own copy of its "
        "prompt"
    )
    with (
        out_of_memory(demanding := build(model, ranks, "on"), place, passes),
        pytest.raises(EnvironmentLackError, match="set it to auto, or lower"),
    ):
        take_step(demanding, 1)


def test_the_check_leaves_no_trace(model: Path, ranks: Ranks) -> None:
    learner = build(model, ranks, "on")
    rows = rows_with_holes(GROUPS)
    difference = shared_prompts.compare(learner.actor, rows, ranks)
    assert 0 <= difference.log_probs < 1e-6
    assert 0 <= difference.gradient < 1e-5
    assert all(parameter.grad is None for parameter in learner.actor.network.parameters())
    assert shared_prompts.compare(learner.actor, [], ranks).gradient == 0


def test_the_check_holds_one_gradient(model: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gradient is twice as large as a model in bfloat16; a second one did not fit beside 7B on one GPU."""
    actor = build(model, ranks, "on").actor
    parameters = [parameter.to_local() for parameter in actor.network.parameters()]
    shape = max((parameter.shape for parameter in parameters), key=torch.Size.numel)

    def count() -> int:
        tensors = [entry for entry in gc.get_objects() if type(entry) is Tensor and entry.shape == shape]
        return len({entry.data_ptr() for entry in tensors})

    counts: list[int] = []
    honest = torch.linalg.vector_norm

    def counting(tensor: Tensor, **options: Any) -> Tensor:
        counts.append(count())
        return honest(tensor, **options)

    monkeypatch.setattr(torch.linalg, "vector_norm", counting)
    gc.collect()
    gc.freeze()  # what is there already is not gone through at every count
    before = count()
    shared_prompts.compare(actor, rows_with_holes(GROUPS), ranks)
    num_alike = sum(parameter.shape == shape for parameter in parameters)
    assert len(counts) == 2 * len(parameters)
    assert 0 < max(counts) - before <= num_alike


def test_the_check_takes_two_rows_and_more_while_half_of_the_budget_has_room() -> None:
    rows = rows_with_holes([[(2, 6)], [(4, 4)] * 5])
    assert len(shared_prompts._family(rows, 64)) == 4
    assert len(shared_prompts._family(rows, 17)) == 2
    assert len(shared_prompts._family(rows, 15)) == 1


@pytest.mark.parametrize("prefixes", [[None, None, None], [None, 0, 0]])
@pytest.mark.parametrize("length", [2, 9])
def test_one_more_sequence_at_the_end_is_as_if_it_had_been_there(
    prefixes: list[int | None], length: int
) -> None:
    grown = PackedSequences.of([4, 3, 3], CPU, prefixes).followed_by(length)
    expected = PackedSequences.of([4, 3, 3, length], CPU, [*prefixes, None])
    assert grown.cu_seqlens.tolist() == expected.cu_seqlens.tolist()
    assert grown.cu_seqlens.dtype == expected.cu_seqlens.dtype
    assert (grown.max_length, grown.blocks) == (expected.max_length, expected.blocks)
    if grown.keys is None or expected.keys is None:
        assert grown.keys is expected.keys
        return
    for name in ("rows", "order", "starts"):
        ours, theirs = (getattr(packed.keys.tokens, name) for packed in (grown, expected))
        assert ours.tolist() == theirs.tolist()
    assert grown.keys.cu_seqlens.tolist() == expected.keys.cu_seqlens.tolist()
    assert grown.keys.max_length == expected.keys.max_length


def test_a_pass_padded_to_a_multiple_gives_the_same_numbers_and_gradients(model: Path, ranks: Ranks) -> None:
    network = load_policy(model, ranks, Precision(compute=torch.float32))
    rows = rows_with_holes(GROUPS)
    plain, gradients = run(network, rows, share_prompts=True)
    network.token_multiple = 64
    padded, others = run(network, rows, share_prompts=True)
    torch.testing.assert_close(padded, plain, atol=1e-6, rtol=0)
    assert close(others, gradients, 1e-6)
