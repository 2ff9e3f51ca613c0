"""Router replay: with an engine's choices the learner computes what a forced reference computes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from paceline.core.errors import ModelError
from paceline.core.samples.expert_choices import ExpertChoices
from paceline.core.training import BatchRow
from paceline.learner.batch.blobs import fetch_rows
from paceline.learner.batch.halve import Halves
from paceline.learner.batch.pack import pack
from paceline.learner.batch.types import MicroBatch, PackedRow, TrainingBatch
from paceline.learner.distributed.ranks import Ranks
from paceline.learner.model.decoder import experts, router_replay
from paceline.learner.model.loading import Precision, as_fsdp, hugging_face_names, load_critic, load_policy
from paceline.learner.model.networks import PolicyNetwork
from paceline.learner.train.state.learner import Learner
from paceline.wire import blob_digest, decode_trajectory, encode_trajectory
from support.expert_models import COMMON_KINDS, write_model
from support.learner_fakes import POLICY, VOCAB_SIZE, DictBlobs, draw_choices, make_batch, run_config
from support.learner_scenarios import numbers, take_step

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("ranks")]

CPU = torch.device("cpu")
KINDS = (*COMMON_KINDS, "glm4_moe_lite", "qwen3_next", "qwen3_5_moe_text")
NUM_EXPERTS, NUM_CHOSEN = 4, 2


def write_greedy(folder: Path, kind: str) -> Any:
    """A model whose tokens choose among all experts."""
    changes = {"topk_method": "greedy"} if kind == "deepseek_v2" else {}
    return write_model(folder, kind, **changes)


def make_rows() -> list[PackedRow]:
    """Three rows, the last two with the same prompt."""
    rng = np.random.default_rng(1)
    prompts = [rng.integers(2, VOCAB_SIZE, length).astype(np.int32) for length in (3, 5)]
    return [
        PackedRow(
            index=index,
            prompt_token_ids=prompts[min(index, 1)],
            response_token_ids=rng.integers(2, VOCAB_SIZE, length).astype(np.int32),
            response_mask=np.ones(length, np.uint8),
            response_log_probs=np.zeros(length, np.float32),
        )
        for index, length in enumerate((2, 6, 4))
    ]


def with_choices(rows: list[PackedRow], num_layers: int, seed: int = 0) -> list[PackedRow]:
    """Rows with drawn choices of all tokens but the last; equal prompts have equal ones."""
    chosen = []
    for row in rows:
        num_tokens, own = (
            len(row.prompt_token_ids) + len(row.response_token_ids),
            [seed, len(row.prompt_token_ids)],
        )
        choices = draw_choices(own, num_tokens, num_layers, NUM_EXPERTS, NUM_CHOSEN)
        chosen.append(replace(row, expert_choices=choices))
    return chosen


def load(folder: Path, ranks: Ranks, *, replay: bool) -> PolicyNetwork:
    network = load_policy(folder, ranks, Precision(compute=torch.float32))
    if replay:
        network.replay_choices()
    return network


def log_probs_and_gradients(network: PolicyNetwork, batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
    log_probs = network(batch)[0]
    log_probs.sum().backward()
    gradients = {
        name: parameter.grad.full_tensor()  # type: ignore[attr-defined]
        for name, parameter in hugging_face_names(network)
        if parameter.grad is not None
    }
    network.zero_grad(set_to_none=True)
    return log_probs.detach(), gradients


def own_choices(network: PolicyNetwork, batch: MicroBatch) -> np.ndarray[Any, Any]:
    """What the routers choose, (T, L, K)."""
    with torch.no_grad(), experts.recorded_choices(network.lm) as choices:
        network(batch)
    as_fsdp(network).reshard()
    return torch.stack([indices for _, indices in choices], dim=1).numpy().astype(np.uint8)


def chosen_by(rows: list[PackedRow], choices: np.ndarray[Any, Any]) -> list[PackedRow]:
    """Rows with their part of the choices of a batch in which none shares its prompt."""
    start, chosen = 0, []
    for row in rows:
        end = start + len(row.prompt_token_ids) + len(row.response_token_ids)
        own = choices[start:end].copy()
        own[-1] = 0
        chosen.append(replace(row, expert_choices=own))
        start = end
    return chosen


@contextmanager
def forced(choices: Tensor) -> Iterator[None]:
    """Within it, transformers' routers choose these experts, (T, L, K), by their own `torch.topk`."""
    honest, layers = torch.topk, iter(range(choices.shape[1]))

    def topk(values: Tensor, k: int, *arguments: Any, **options: Any) -> Any:
        if (values.shape[-1], k) != (NUM_EXPERTS, NUM_CHOSEN):
            return honest(values, k, *arguments, **options)
        own = choices[:, next(layers)].long()
        own = torch.where(own[:, :1] != own[:, 1:], own, honest(values, k)[1])
        return values.gather(-1, own), own

    torch.topk = topk  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.topk = honest


def reference(model: Any, rows: list[PackedRow]) -> Tensor:
    """Log-probs by transformers, a row at a time, with the rows' choices."""
    parts = []
    for row in rows:
        ids = np.concatenate([row.prompt_token_ids, row.response_token_ids]).astype(np.int64)
        tokens, start = torch.from_numpy(ids), len(row.prompt_token_ids)
        with forced(torch.from_numpy(row.expert_choices)):
            scores = model(tokens[None]).logits[0, start - 1 : -1].log_softmax(-1)
        parts.append(scores.gather(-1, tokens[start:, None]).squeeze(-1))
    return torch.cat(parts)


@pytest.mark.parametrize("kind", KINDS)
def test_the_own_choices_change_no_bit(kind: str, ranks: Ranks, tmp_path: Path) -> None:
    write_greedy(tmp_path, kind)
    plain, replaying = (load(tmp_path, ranks, replay=replay) for replay in (False, True))
    batch = pack(make_rows(), CPU)
    choices = own_choices(plain, batch)
    expected = log_probs_and_gradients(plain, batch)
    for rows in (chosen_by(make_rows(), choices), make_rows()):  # also without any
        log_probs, gradients = log_probs_and_gradients(replaying, pack(rows, CPU))
        assert torch.equal(log_probs, expected[0])
        assert gradients.keys() == expected[1].keys()
        assert all(torch.equal(gradients[name], own) for name, own in expected[1].items())


@pytest.mark.parametrize("kind", KINDS)
def test_other_choices_are_those_of_a_forced_reference(kind: str, ranks: Ranks, tmp_path: Path) -> None:
    model = write_greedy(tmp_path, kind).double()
    model.set_experts_implementation("eager")  # the other one has no float64
    network = load(tmp_path, ranks, replay=True)
    rows = with_choices(make_rows(), len(network.replaying))
    log_probs, gradients = log_probs_and_gradients(network, pack(rows, CPU))
    expected = reference(model, rows)
    torch.testing.assert_close(log_probs.double(), expected, atol=1e-5, rtol=1e-5)
    assert (log_probs - network(pack(make_rows(), CPU))[0]).abs().max() > 1e-3
    expected.sum().backward()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            # Single precision rounds a sum to its largest terms, however small some elements are.
            atol = 2e-4 * float(parameter.grad.abs().max())
            torch.testing.assert_close(gradients[name].double(), parameter.grad, atol=atol, rtol=0.0)
    of_routers = [
        gradients[name]
        for name, _ in model.named_parameters()
        if name.endswith((".gate.weight", ".router.weight"))
    ]
    assert len(of_routers) == len(network.replaying)
    assert all(gradient.abs().max() > 1e-6 for gradient in of_routers)


def test_a_shared_prompt_has_its_choices_once(ranks: Ranks, tmp_path: Path) -> None:
    write_model(tmp_path, "qwen3_moe")
    network = load(tmp_path, ranks, replay=True)
    rows = with_choices(make_rows(), 3)
    batch = pack(rows, CPU, share_prompts=True)
    assert batch.expert_choices is not None
    assert len(batch.expert_choices) == batch.input_ids.shape[1] == 5 + 5 + 6 + 4
    with torch.no_grad():
        log_probs = [network(b)[0] for b in (batch, pack(rows, CPU))]
    torch.testing.assert_close(*log_probs, atol=1e-5, rtol=1e-5)


def with_other_choices(row: BatchRow, blob: bytes) -> tuple[BatchRow, bytes]:
    """The sample of an engine that chose other experts for the prompt, too."""
    trajectory = decode_trajectory(blob, vocab_size=VOCAB_SIZE)
    drawn = draw_choices([7], row.num_prompt_tokens + row.num_response_tokens, 3, NUM_EXPERTS, NUM_CHOSEN)
    blob = encode_trajectory(replace(trajectory, expert_choices=ExpertChoices.of(drawn)))
    return replace(row, blob_digest=blob_digest(blob)), blob


def test_all_samples_of_a_prompt_have_the_first_ones_choices_for_it() -> None:
    """Also one that the engine gave none, and one with others; other prompts keep their own."""
    made, blobs = make_batch(num_prompts=2, num_samples=4, choices=(3, 4, 2))
    plain, without = make_batch(num_prompts=2, num_samples=4)
    rows = dict(enumerate(made))
    rows[2], blobs[rows[2].blob_key] = plain[2], without[rows[2].blob_key]
    rows[3], blobs[rows[3].blob_key] = with_other_choices(rows[3], blobs[rows[3].blob_key])
    wanted = [1, 2, 3, 6]

    def fetch(places: list[int]) -> dict[int, PackedRow]:
        return fetch_rows(DictBlobs(blobs), rows, places, policy=POLICY, vocab_size=VOCAB_SIZE)

    packed, alone = fetch(wanted), {place: fetch([place])[place] for place in wanted}
    length, first = rows[1].num_prompt_tokens, alone[1].expert_choices
    assert first is not None
    assert alone[2].expert_choices is None
    for place in (1, 2, 3):
        choices, own = packed[place].expert_choices, alone[place].expert_choices
        assert choices is not None
        assert np.array_equal(choices[:length], first[:length])
        rest = np.zeros_like(choices[length:]) if own is None else own[length:]
        assert np.array_equal(choices[length:], rest)
    third, other = alone[3].expert_choices, alone[6].expert_choices
    assert third is not None
    assert other is not None
    assert not np.array_equal(third[:length], first[:length])
    assert packed[6].expert_choices is not None
    assert np.array_equal(packed[6].expert_choices, other)


def test_halves_keep_the_choices_of_their_rows(ranks: Ranks, tmp_path: Path) -> None:
    write_model(tmp_path, "qwen3_moe")
    network = load(tmp_path, ranks, replay=True)
    batch = pack(with_choices(make_rows(), 3), CPU)
    table = torch.zeros(batch.mask.shape)
    part = TrainingBatch(
        batch=batch,
        log_probs={},
        values=None,
        scores=table[:, 0],
        group_ids=table[:, 0],
        advantages=table,
        returns=None,
        weights=None,
    )
    with torch.no_grad():
        halves = torch.cat([network(half.batch)[0] for half in Halves.of(part).halves])
        torch.testing.assert_close(halves, network(batch)[0], atol=1e-5, rtol=1e-5)


def test_choices_of_each_segment_are_those_of_its_tokens() -> None:
    """A history that was rewritten: [prompt response] [segment]."""
    row = replace(with_choices(make_rows(), 2)[1], segment_starts=(3,))
    batch = pack([row, row], CPU)
    assert row.expert_choices is not None
    assert batch.expert_choices is not None
    expected = np.concatenate([row.expert_choices, row.expert_choices])
    assert np.array_equal(batch.expert_choices.numpy(), expected)


def test_many_experts_need_two_bytes() -> None:
    row = with_choices(make_rows(), 2)[0]
    assert row.expert_choices is not None
    wide = row.expert_choices.astype(np.uint16) + 300
    batch = pack([replace(row, expert_choices=wide), make_rows()[0]], CPU)
    assert batch.expert_choices is not None
    assert batch.expert_choices.dtype == torch.int16
    assert np.array_equal(batch.expert_choices[: len(wide)].numpy(), wide)
    assert not batch.expert_choices[len(wide) :].any()


def test_each_rank_of_a_context_takes_its_own_run_of_choices() -> None:
    routers = [torch.nn.Module() for _ in range(2)]
    for router in routers:
        router.top_k, router.num_experts = 2, NUM_EXPERTS  # type: ignore[assignment]
        router.weight = torch.nn.Parameter(torch.zeros(1))
    choices = pack(with_choices(make_rows(), 2), CPU).expert_choices
    assert choices is not None
    router_replay.give_choices(routers, choices, 16, start=16)
    for layer, router in enumerate(routers):
        assert torch.equal(router.given[: len(choices) - 16], choices[16:, layer])  # type: ignore[index]
        assert not router.given[len(choices) - 16 :].any()  # type: ignore[index, union-attr]


def test_a_router_of_many_experts_gets_their_numbers() -> None:
    router: Any = torch.nn.Module()
    router.top_k, router.num_experts, router.weight = 2, 300, torch.nn.Parameter(torch.zeros(1))
    choices = torch.tensor([[[299, 3]], [[0, 0]]], dtype=torch.int16)
    router_replay.give_choices([router], choices, 3, start=0)
    assert router.given.tolist() == [[299, 3], [0, 0], [0, 0]]


@pytest.mark.parametrize("fault", ["layers", "experts", "chosen"])
def test_choices_of_another_model_are_refused(fault: str, ranks: Ranks, tmp_path: Path) -> None:
    write_model(tmp_path, "qwen3_moe")
    network = load(tmp_path, ranks, replay=True)
    row = with_choices(make_rows(), 4 if fault == "layers" else 3)[1]
    assert row.expert_choices is not None
    if fault == "experts":
        row.expert_choices[2, 1, 0] = NUM_EXPERTS
    if fault == "chosen":
        row = replace(row, expert_choices=np.concatenate([row.expert_choices, row.expert_choices], axis=-1))
    with pytest.raises(ModelError, match="engine and learner run different models"):
        network(pack([row], CPU))


def test_changes_are_counted_by_token(ranks: Ranks, tmp_path: Path) -> None:
    write_model(tmp_path, "qwen3_moe")
    network = load(tmp_path, ranks, replay=True)
    row = make_rows()[1]
    own = own_choices(network, pack([row], CPU))
    # The first response token's state is the prompt's last. In another order they are the same choices.
    choices = own[..., ::-1].copy()
    unchosen = [next(e for e in range(4) if e not in own[4, layer]) for layer in range(3)]
    choices[4, 2, 0] = unchosen[2]  # one of three layers
    choices[6] = 0
    batch = pack([replace(row, expert_choices=choices)], CPU)
    with torch.no_grad(), experts.recorded_choices(network.lm):
        network(batch)
    changed, missing = router_replay.changes_by_token(network.replaying, batch)
    assert changed.tolist() == pytest.approx([1 / 3, 0.0, 0.0, 0.0, 0.0, 0.0])
    assert missing.tolist() == [0.0, 0.0, 1.0, 0.0, 0.0, 0.0]


def test_the_reference_takes_the_choices_too(ranks: Ranks, tmp_path: Path) -> None:
    """Of the same weights it then has the same log-probs."""
    write_model(tmp_path, "qwen3_moe")
    config = run_config(
        tmp_path,
        algorithm={"adv_estimator": "grpo", "kl_ctrl": {"type": "fixed", "kl_coef": 0.1}},
        actor={"router_replay": True},
    )
    first = numbers(take_step(Learner.build(config, ranks), 1, choices=(3, NUM_EXPERTS, NUM_CHOSEN)))
    assert first["actor/router_replay_changed"] > 0.3
    assert first["algorithm/reference_kl"] == 0.0


def test_a_critic_chooses_by_itself(ranks: Ranks, tmp_path: Path) -> None:
    write_model(tmp_path, "qwen3_moe")
    critic = load_critic(tmp_path, ranks, Precision(compute=torch.float32), seed=0)
    rows = make_rows()
    with torch.no_grad():
        values = [critic(pack(given, CPU)) for given in (rows, with_choices(rows, 3))]
    assert torch.equal(*values)


def test_a_router_of_an_unknown_kind_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    write_model(tmp_path, "qwen3_moe")
    network = load(tmp_path, ranks, replay=False)
    for router in experts.routers(network.lm):
        router.__class__ = type("OtherTopKRouter", (type(router),), {})
    with pytest.raises(ModelError, match="does not know how OtherTopKRouter weighs the experts"):
        network.replay_choices()
