"""Drawing a batch by seeds and positions: the numbers, the distribution, and who keeps which row."""

from __future__ import annotations

import asyncio
import math
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from paceline.core.errors import WeightSyncError
from paceline.engines.memory import EngineMemory
from paceline.models.model_shape import ModelShape
from paceline.rollout.engines.sampling.draw import SLICE, draw, truncated, uniforms
from paceline.rollout.engines.vllm.sampling.log_probs import LogProbs
from paceline.rollout.engines.vllm.sampling.places import Places
from support.cli_configs import config
from support.live_bytes import LiveBytes

CPU = torch.device("cpu")
MASK = (1 << 64) - 1


def mixed(x: int) -> int:
    """SplitMix64's finalizer in Python's own numbers."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def test_numbers_follow_from_seed_and_position_alone() -> None:
    gamma, first = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9
    table = uniforms(torch.tensor([0, 7, 2**31 - 1]), 5)
    expected = [
        [
            (mixed((mixed((seed * gamma + first) & MASK) + position * gamma) & MASK) >> 16) / 2**48
            for position in range(1, 6)
        ]
        for seed in (0, 7, 2**31 - 1)
    ]
    assert table.tolist() == expected
    assert torch.equal(uniforms(torch.tensor([7]), 3)[0], table[1, :3])


def test_numbers_are_uniform_and_neighbours_have_nothing_in_common() -> None:
    table = uniforms(torch.arange(400), 500)
    assert float(table.mean()) == pytest.approx(0.5, abs=3e-3)
    counts = torch.histc(table.float(), bins=64, min=0.0, max=1.0)
    chi_square = float(((counts - counts.mean()) ** 2 / counts.mean()).sum())
    assert chi_square < 63 + 5 * (2 * 63) ** 0.5
    for other in (table[1:], table[:, 1:]):  # the next seed, the next position
        same = table[: len(other), : other.shape[1]]
        correlation = torch.corrcoef(torch.stack([same.flatten(), other.flatten()]))[0, 1]
        assert abs(float(correlation)) < 0.01


def test_the_memory_plan_counts_what_the_tables_hold() -> None:
    num_sequences, length = 16, 4097
    places = Places(2 * num_sequences, length, CPU, lambda name: False)
    tables = places.numbers.nbytes + places.log_probs.nbytes
    seeds = torch.arange(num_sequences)
    with LiveBytes() as live:
        uniforms(seeds, length)
    data = {"train_files": ["x"], "max_prompt_length": 96, "max_response_length": length - 1 - 96}
    run = config(rollout={"max_num_seqs": num_sequences}, data=data)
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 8}
    shape = ModelShape.of(sizes | {"vocab_size": 3000})
    assert shape is not None
    kernels = 12 * num_sequences * 3  # three slices of 1,024 tokens
    assert EngineMemory.of(run, shape).sampler - kernels == pytest.approx(tables + live.most, rel=0.01)


@pytest.mark.parametrize("vocab", [3, SLICE, 3 * SLICE + 17])
def test_the_token_is_where_the_sum_of_probabilities_passes_the_number(vocab: int) -> None:
    generator = torch.Generator().manual_seed(0)
    log_probs = (4 * torch.randn(300, vocab, generator=generator)).log_softmax(-1)
    numbers = torch.rand(300, generator=generator, dtype=torch.float64)
    ends = log_probs.exp().double().cumsum(-1)
    expected = (ends <= (numbers * ends[:, -1]).unsqueeze(-1)).sum(-1)
    drawn = draw(log_probs, numbers)
    # Sums in another order: a number within a rounding of an end may fall on its other side.
    assert int((drawn != expected).sum()) <= 1
    assert int((drawn - expected).abs().max()) <= 1


def test_the_ends_of_the_range_draw_the_first_and_the_last_token_that_can_be() -> None:
    log_probs = torch.full((2, SLICE + 9), -torch.inf)
    log_probs[:, [3, SLICE + 5]] = torch.tensor(0.5).log()
    numbers = torch.tensor([0.0, 1 - 2.0**-48], dtype=torch.float64)
    assert draw(log_probs, numbers).tolist() == [3, SLICE + 5]


@pytest.mark.parametrize("num_tokens", [1, 8, 1 << 22])
def test_truncated_distributions_are_those_of_the_likeliest_tokens(
    num_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.rollout.engines.sampling.draw.SORTED_TOKENS", num_tokens)
    probs = torch.tensor([[0.1, 0.4, 0.2, 0.3], [0.1, 0.4, 0.2, 0.3], [0.7, 0.1, 0.1, 0.1]]).repeat(2, 1)
    top_p = torch.tensor([0.6, 1.0, 1e-50, 1.0, 0.75, 0.85])
    top_k = torch.tensor([0, 3, 0, 0, 1, 4])
    kept = truncated(probs.log(), top_p, top_k).exp()
    expected = [
        [0, 4 / 7, 0, 3 / 7],
        [0, 4 / 9, 2 / 9, 3 / 9],
        [1, 0, 0, 0],
        [0.1, 0.4, 0.2, 0.3],
        [0, 1, 0, 0],
        [7 / 9, 1 / 9, 1 / 9, 0],
    ]
    torch.testing.assert_close(kept, torch.tensor(expected))
    numbers = torch.linspace(0, 1 - 1e-9, 50, dtype=torch.float64)
    drawn = draw(kept[:1].log().expand(50, -1), numbers)
    assert set(drawn.tolist()) == {1, 3}


def test_a_row_draws_the_same_whatever_is_beside_it() -> None:
    logits = 3 * torch.randn(64, 700, generator=torch.Generator().manual_seed(1))
    log_probs, numbers = logits.log_softmax(-1), uniforms(torch.arange(64), 1)[:, 0]
    together = draw(log_probs, numbers)
    alone = torch.cat([draw(log_probs[i : i + 1], numbers[i : i + 1]) for i in range(64)])
    backwards = draw(log_probs.flip(0), numbers.flip(0)).flip(0)
    assert torch.equal(together, alone)
    assert torch.equal(together, backwards)


def test_a_request_keeps_its_row_until_it_is_fetched() -> None:
    running = {"a", "b"}
    places = Places(2, 6, CPU, running.__contains__)
    rows = places.rows_of({"a": 5, "b": 6})
    assert torch.equal(places.numbers[rows], uniforms(torch.tensor([5, 6]), 6))
    places.log_probs[rows, torch.tensor([2, 3])] = torch.tensor([-1.0, -2.0])
    assert places.rows_of({"b": 6, "a": 5}).tolist() == rows.flip(0).tolist()
    assert places.log_probs[rows[1], 3] == -2.0  # not cleared again
    assert places.take(["b", "a"], [3, 2], [1, 1]).tolist() == [-2.0, -1.0]
    with pytest.raises(WeightSyncError, match="no log-probabilities of request a"):
        places.take(["a"], [2], [1])


def test_what_has_ended_waits_on_the_host_however_late_it_is_fetched() -> None:
    running: set[str] = set()
    places = Places(4, 6, CPU, running.__contains__)
    ids = [f"r{number}" for number in range(30)]
    for number in range(0, 30, 2):  # two at a time, in four rows
        running.clear()
        running.update(ids[number : number + 2])
        rows = places.rows_of({ids[number]: number, ids[number + 1]: number + 1})
        assert places.log_probs[rows].isnan().all()
        places.log_probs[rows, 2] = torch.tensor([-1.0 - number, -2.0 - number])
        if number % 4 == 0:  # and a position more of every second pair
            places.log_probs[rows, 3] = -0.5
    taken = places.take(ids[::-1], [2] * 30, [1] * 30)
    assert taken.tolist() == [-30.0 + number for number in range(30)]
    assert set(places.rows_of({f"next {number}": number for number in range(4)}).tolist()) == {0, 1, 2, 3}


def test_a_request_that_gave_way_to_others_goes_on_with_its_values() -> None:
    running = {"a", "b"}
    places = Places(2, 6, CPU, running.__contains__)
    places.log_probs[places.rows_of({"a": 1, "b": 2})[0], torch.tensor([2, 3])] = torch.tensor([-1.0, -2.0])
    running.remove("a")
    running.add("c")
    places.rows_of({"b": 2, "c": 3})
    running.remove("b")
    running.add("a")
    rows = places.rows_of({"a": 1, "c": 3})
    assert torch.equal(places.numbers[rows[0]], uniforms(torch.tensor([1]), 6)[0])
    places.log_probs[rows[0], 4] = -3.0
    assert places.take(["a"], [2], [3]).tolist() == [-1.0, -2.0, -3.0]


def test_values_that_are_not_numbers_stay_so_on_the_host() -> None:
    running = {"a", "b"}
    places = Places(2, 6, CPU, running.__contains__)
    places.log_probs[places.rows_of({"a": 1, "b": 2})[0], torch.tensor([2, 3])] = torch.tensor(
        [-1.0, torch.nan]
    )
    running.clear()
    places.rows_of({"c": 3})
    first, second = places.take(["a"], [2], [2]).tolist()
    assert first == -1.0
    assert math.isnan(second)


def test_the_rows_of_aborted_requests_go_to_others_once_the_worker_knows() -> None:
    running = {"aborted", "running"}
    places = Places(2, 4, CPU, running.__contains__)
    places.log_probs[places.rows_of({"aborted": 1, "running": 2})] = -1.0
    places.forget(["aborted", "never seen"])
    # One more token of it, under way already.
    assert places.rows_of({"aborted": 1, "running": 2}).tolist() == [1, 0]
    running.remove("aborted")
    running.add("new")
    rows = places.rows_of({"running": 2, "new": 3})
    assert rows.tolist() == [0, 1]
    assert places.log_probs[rows[0]].tolist() == [-1.0] * 4
    with pytest.raises(WeightSyncError, match="no log-probabilities of request aborted"):
        places.take(["aborted"], [0], [1])
    assert places.take(["new"], [0], [4]).isnan().all()

    running.clear()
    places.rows_of({"x": 4, "y": 5})  # "running" goes to the host, and is aborted there
    places.forget(["running"])
    with pytest.raises(WeightSyncError, match="no log-probabilities of request running"):
        places.take(["running"], [0], [1])


def test_a_requests_log_probs_and_versions_outlive_a_push_in_mid_answer() -> None:
    """Request a is half drawn when weights come, b has its prompt in part, c begins after that."""
    running = {"a", "b", "c"}
    places = Places(4, 8, CPU, running.__contains__)
    places.begin_version(7, mid_answer=False)
    places.rows_of({"a": 1, "b": 2})
    rows = places.rows_of({"a": 1, "b": 2})
    places.log_probs[rows[0], 3:5] = torch.tensor([-1.0, -2.0])  # a prompt of 3 tokens
    places.log_probs[rows[1], 2] = -9.0  # drawn at the end of a part of b's prompt of 4 tokens
    places.begin_version(8, mid_answer=True)
    # Keys and values are computed again, and what is drawn on the way is written over the first.
    places.log_probs[rows[0], 3:7] = torch.tensor([-5.0, -6.0, -3.0, -4.0])
    places.log_probs[rows[1], 4:6] = torch.tensor([-1.5, -2.5])
    places.log_probs[places.rows_of({"c": 3})[0], 1] = -0.5
    asked = (["a", "b", "c"], [3, 4, 1], [4, 2, 1])
    assert places.versions(*asked) == [[(0, 7), (2, 8)], [(0, 8)], [(0, 8)]]
    assert places.take(*asked).tolist() == [-1.0, -2.0, -3.0, -4.0, -1.5, -2.5, -0.5]


def test_the_same_version_twice_is_one_range_and_a_third_adds_one() -> None:
    places = Places(2, 8, CPU, {"a"}.__contains__)
    places.begin_version(3, mid_answer=False)
    row = places.rows_of({"a": 1})[0]
    for position, version in ((1, 3), (2, 3), (3, 4), (4, 5)):
        places.begin_version(version, mid_answer=True)
        places.log_probs[row, position] = -float(position)
    assert places.versions(["a"], [1], [4]) == [[(0, 3), (2, 4), (3, 5)]]
    assert places.versions(["a"], [1], [2]) == [[(0, 3)]]
    assert places.take(["a"], [1], [4]).tolist() == [-1.0, -2.0, -3.0, -4.0]


def test_an_aborted_request_does_not_stand_in_the_way_of_a_push_in_mid_answer() -> None:
    places = Places(4, 8, CPU, {"aborted", "running"}.__contains__)
    places.begin_version(3, mid_answer=False)
    rows = places.rows_of({"aborted": 1, "running": 2})
    places.log_probs[rows, 1] = -1.0
    places.forget(["aborted"])
    places.begin_version(4, mid_answer=True)
    places.log_probs[rows[1], 2] = -2.0
    assert places.versions(["running"], [1], [2]) == [[(0, 3), (1, 4)]]
    assert places.take(["running"], [1], [2]).tolist() == [-1.0, -2.0]
    places.begin_version(5, mid_answer=True)  # only the aborted one has a row now


async def test_samples_that_end_during_a_call_share_the_next_one() -> None:
    calls: list[Any] = []

    async def fetch(ids: list[str], starts: list[int], counts: list[int], aborted: list[str]) -> Any:
        calls.append((ids, starts, counts, aborted))
        await asyncio.sleep(0.01)
        if "broken" in ids:
            raise WeightSyncError("no such request")
        values = [np.arange(s, s + c, dtype=np.float32) for s, c in zip(starts, counts, strict=True)]
        return np.concatenate(values).tobytes(), [[(0, 7)] for _ in ids]

    subject = LogProbs(fetch)

    async def late(request_id: str, start: int, count: int) -> Any:
        await asyncio.sleep(0.002)
        return await subject.take(request_id, start, count)

    results = await asyncio.gather(
        subject.take("first", 10, 2),
        late("second", 20, 3),
        late("third", 30, 1),
        subject.take("none", 0, 0),
    )
    assert [list(told) for _, told in results] == [[(0, 7)], [(0, 7)], [(0, 7)], []]
    assert [result.tolist() for result, _ in results] == [[10, 11], [20, 21, 22], [30], []]
    assert calls == [(["first"], [10], [2], []), (["second", "third"], [20, 30], [3, 1], [])]
    async with asyncio.timeout(120):  # what came during a call that failed is fetched all the same
        failed, fetched = await asyncio.gather(
            subject.take("broken", 0, 1), late("fourth", 1, 1), return_exceptions=True
        )
    assert isinstance(failed, WeightSyncError)
    assert fetched[0].tolist() == [1]
    calls.clear()
    subject.forget(["aborted"])
    await subject.take("fifth", 1, 1)
    await subject.take("sixth", 1, 1)
    assert [aborted for *_, aborted in calls] == [["aborted"], []]
    await subject.close()


@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore")  # vLLM's imports warn about themselves
def test_log_probs_are_those_of_vllms_own_sampler_row_by_row() -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed")
    from vllm import SamplingParams
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
    from vllm.v1.sample.sampler import Sampler

    from paceline.rollout.engines.vllm.sampling.batched_sampler import replace_sampler
    from paceline.rollout.engines.vllm.sampling.samples import SEED

    temperatures, prompt = [0.0, 1.0, 0.7, 1.0], 3
    top_p, top_k = [1.0, 1.0, 0.5, 1.0], [0, 0, 0, 2]
    ids = [f"r{number}" for number in range(4)]
    requests = {
        name: SimpleNamespace(
            sampling_params=SamplingParams(
                temperature=value,
                top_p=top_p[number],
                top_k=top_k[number],
                extra_args={SEED: number},
                detokenize=False,
            )
        )
        for number, (name, value) in enumerate(zip(ids, temperatures, strict=True))
    }
    runner = SimpleNamespace(
        sampler=Sampler(logprobs_mode="processed_logprobs"),
        input_batch=SimpleNamespace(req_ids=list(ids)),
        requests=requests,
        seq_lens=torch.full((8,), prompt, dtype=torch.int32),
        max_num_reqs=4,
        max_model_len=16,
        device=CPU,
    )
    subject: Any = replace_sampler(runner)
    assert runner.sampler is subject
    generator = torch.Generator().manual_seed(2)
    drawn: dict[str, list[int]] = {name: [] for name in ids}
    expected: dict[str, list[float]] = {name: [] for name in ids}
    for step in range(5):
        if step == 2:  # rows change places
            runner.input_batch.req_ids.reverse()
        order = list(runner.input_batch.req_ids)
        logits = 4 * torch.randn(4, 700, generator=generator)
        tokens = subject(logits.clone(), None).sampled_token_ids[:, 0].tolist()
        for row, name in enumerate(order):
            temperature = temperatures[ids.index(name)]
            number = ids.index(name)
            scaled = logits[row : row + 1] / (temperature or 1.0)
            scaled = apply_top_k_top_p(
                scaled, torch.tensor([top_k[number] or 700]), torch.tensor([top_p[number]])
            )
            expected[name].append(float(Sampler.compute_logprobs(scaled)[0, tokens[row]]))
            drawn[name].append(tokens[row])
            assert temperature or tokens[row] == int(logits[row].argmax())
        runner.seq_lens += 1
    taken = subject.places.take(ids, [prompt] * 4, [5] * 4).view(4, 5)
    torch.testing.assert_close(taken, torch.tensor([expected[name] for name in ids]), atol=1e-6, rtol=0)
    assert len({tuple(tokens) for tokens in drawn.values()}) == 4


class OfSecondRunner:
    """Stands in for the sampler of vLLM's second model runner, whose kernels need a GPU."""

    def __init__(self, req_states: Any) -> None:
        self.req_states = req_states
        self.added: list[int] = []

    def add_request(self, req_idx: int, prompt_len: int, sampling_params: Any) -> None:
        self.added.append(req_idx)

    def __call__(self, logits: torch.Tensor, input_batch: Any) -> str:
        return "the engine's own"


@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore")
def test_the_second_model_runner_draws_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed")
    from vllm import SamplingParams
    from vllm.v1.worker.gpu import input_batch as second

    from paceline.rollout.engines.vllm.sampling import batched_sampler
    from paceline.rollout.engines.vllm.sampling.samples import SEED

    monkeypatch.setattr(batched_sampler, "_is_second", lambda sampler: isinstance(sampler, OfSecondRunner))
    monkeypatch.setattr(second, "get_num_sampled_and_rejected", lambda sampled, *_: (sampled, 0 * sampled))
    places = {"a": 5, "b": 2, "foreign": 0}
    states = SimpleNamespace(req_id_to_index=dict(places), prefill_len=SimpleNamespace(gpu=None))
    runner = SimpleNamespace(
        sampler=OfSecondRunner(states), req_states=states, max_num_reqs=4, max_model_len=16, device=CPU
    )
    engines, subject = runner.sampler, cast(Any, batched_sampler.replace_sampler(runner))
    for number, name in enumerate("ab"):
        params = SamplingParams(temperature=1.0, extra_args={SEED: number}, detokenize=False)
        subject.add_request(places[name], 3, params)
    subject.add_request(places["foreign"], 3, SamplingParams())
    assert engines.added == [5, 2, 0]  # vLLM's own state is kept

    def batch(ids: list[str], seq_len: int) -> Any:
        lengths = torch.full((len(ids),), seq_len, dtype=torch.int32)
        return SimpleNamespace(req_ids=ids, seq_lens=lengths, cu_num_logits=None, idx_mapping=None)

    logits = 4 * torch.randn(2, 700, generator=torch.Generator().manual_seed(3))
    expected = draw(logits.log_softmax(-1), uniforms(torch.tensor([1, 0]), 4)[:, 3])
    output = subject(logits, batch(["b", "a"], 3))
    assert output.sampled_token_ids.tolist() == expected.unsqueeze(-1).tolist()
    assert output.num_sampled.tolist() == [1, 1]
    taken = subject.places.take(["b", "a"], [3, 3], [1, 1])
    torch.testing.assert_close(taken, logits.log_softmax(-1).gather(-1, expected.unsqueeze(-1)).squeeze(-1))
    assert subject(logits, batch(["a", "foreign"], 3)) == "the engine's own"


@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore")
def test_a_sampler_of_another_kind_is_refused() -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed")
    from paceline.core.errors import ModelError
    from paceline.rollout.engines.vllm.sampling.batched_sampler import replace_sampler

    with pytest.raises(ModelError, match="write rollout.sampler: engine"):
        replace_sampler(SimpleNamespace(sampler=object()))
