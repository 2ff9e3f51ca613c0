"""Which attention kernel a GPU's process takes, with stand-ins for kernels; on a GPU: the test beside it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    MambaConfig,
    MistralConfig,
    Qwen2Config,
)

from paceline.core.errors import EnvironmentLackError
from paceline.learner.model.decoder import flash_attention
from paceline.learner.model.decoder.flash_attention import Kind, Lengths, Scoring

pytestmark = pytest.mark.torch

CPU = torch.device("cpu")
KIND = Kind(heads=4, groups=2, width=16, value_width=8, windowed=True, dtype=torch.bfloat16, device=CPU)


def plain(q: Tensor, k: Tensor, v: Tensor, lengths: Lengths, scoring: Scoring) -> Tensor:
    """Attention in float32, sequence by sequence."""
    repeats = q.shape[1] // k.shape[1]
    outputs = []
    for i in range(len(lengths.queries) - 1):
        queries = q[lengths.queries[i] : lengths.queries[i + 1]].float().transpose(0, 1)
        keys, values = (
            x[lengths.keys[i] : lengths.keys[i + 1]].float().repeat_interleave(repeats, 1).transpose(0, 1)
            for x in (k, v)
        )
        num_queries, num_keys = queries.shape[1], keys.shape[1]
        back = torch.arange(num_keys - num_queries, num_keys)[:, None] - torch.arange(num_keys)
        seen = (back >= 0) & (back < (scoring.window or num_keys))
        scores = queries @ keys.transpose(1, 2) * (scoring.scaling or q.shape[-1] ** -0.5)
        if scoring.softcap is not None:
            scores = torch.tanh(scores / scoring.softcap) * scoring.softcap
        outputs.append((scores.masked_fill(~seen, -torch.inf).softmax(-1) @ values).transpose(0, 1))
    return torch.cat(outputs).to(q.dtype)


def wrong_gradient(q: Tensor, *rest: Any) -> Tensor:
    """The same values."""
    return plain(q.detach() + 1.05 * (q - q.detach()), *rest)


def wrong_in(wrong: int) -> Callable[..., Tensor]:
    """A kernel whose values are 3 % off in the drawn sequence of this number, and right elsewhere."""

    def kernel(q: Tensor, k: Tensor, v: Tensor, lengths: Lengths, *rest: Any) -> Tensor:
        factors = torch.ones(len(q))
        factors[lengths.queries[wrong] : lengths.queries[wrong + 1]] = 1.03
        return (plain(q, k, v, lengths, *rest).float() * factors[:, None, None]).to(q.dtype)

    return kernel


def failing(*_: Any) -> Tensor:
    raise AssertionError("head_dim 16 is not supported")


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Stands in for a GPU with the package."""
    monkeypatch.setattr(flash_attention, "_is_installed", lambda: True)
    monkeypatch.setattr(flash_attention, "by_torch", plain)
    monkeypatch.setattr(flash_attention, "by_flash_attention_4", plain)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    flash_attention._kernel_of.cache_clear()
    yield
    flash_attention.choose("auto")
    flash_attention._kernel_of.cache_clear()


def test_auto_takes_flash_attention_4_where_it_computes_what_torch_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def four(*args: Any) -> Tensor:
        return plain(*args)

    monkeypatch.setattr(flash_attention, "by_flash_attention_4", four)
    assert flash_attention._kernel_of(KIND, "auto") is four
    assert flash_attention._kernel_of(KIND, "flash_attention_4") is four
    assert flash_attention._kernel_of(KIND, "torch") is plain


@pytest.mark.parametrize(
    ("kernel", "reason"),
    [
        (failing, "AssertionError: head_dim 16 is not supported"),
        (wrong_gradient, "differ from those of torch's kernel by 0.05"),
    ],
)
def test_torchs_is_taken_and_the_log_says_why(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    kernel: Callable[..., Tensor],
    reason: str,
) -> None:
    monkeypatch.setattr(flash_attention, "by_flash_attention_4", kernel)
    assert flash_attention._kernel_of(KIND, "auto") is plain
    assert "FlashAttention 4 does not work for 4 heads of 16, 2 of keys" in caplog.text
    assert reason in caplog.text
    with pytest.raises(EnvironmentLackError, match=r"set actor\.attention_kernel: auto") as caught:
        flash_attention._kernel_of(KIND, "flash_attention_4")
    assert reason in str(caught.value)


def test_each_drawn_sequence_is_judged_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one norm over all of them the sequence of one query would be lost."""
    assert max(keys for _, keys in flash_attention._TRIED_LENGTHS) == 4000
    for number in range(len(flash_attention._TRIED_LENGTHS)):
        monkeypatch.setattr(flash_attention, "by_flash_attention_4", wrong_in(number))
        assert 0.02 < flash_attention._difference(KIND) < 0.04


def test_numbers_that_are_not_finite_are_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_attention, "by_flash_attention_4", lambda *args: plain(*args) * torch.nan)
    assert flash_attention._difference(KIND) > 1e6


def test_scores_with_a_softcap_have_flash_attention_4_or_the_formula(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def without_cap(q: Tensor, k: Tensor, v: Tensor, lengths: Lengths, scoring: Scoring) -> Tensor:
        return plain(q, k, v, lengths, dataclasses.replace(scoring, softcap=None))

    capped = dataclasses.replace(KIND, softcap=1.0)
    assert flash_attention._kernel_of(capped, "auto") is plain
    assert flash_attention._kernel_of(capped, "torch") is None
    flash_attention._kernel_of.cache_clear()
    monkeypatch.setattr(flash_attention, "by_flash_attention_4", without_cap)
    assert flash_attention._kernel_of(capped, "auto") is None
    assert "a softcap of 1 (its numbers differ from those of the formula" in caplog.text
    q, k, v = (torch.randn(10, heads, 16) for heads in (4, 2, 2))
    assert not flash_attention.has_softcap(q, k, v, Scoring(softcap=1.0))
    monkeypatch.setattr(flash_attention, "by_flash_attention_4", plain)
    bounds = torch.tensor([0, 4, 10], dtype=torch.int32)
    lengths = Lengths(queries=bounds, keys=bounds, max_queries=6, max_keys=6)
    scoring = Scoring(window=3, softcap=2.0)
    assert flash_attention.has_softcap(q, k, v, scoring)
    out = flash_attention.attend(q, k, v, lengths, scoring)
    torch.testing.assert_close(out, plain(q, k, v, lengths, scoring))


@pytest.mark.parametrize("scoring", [Scoring(), Scoring(scaling=0.3, window=3, softcap=2.0)])
def test_the_formula_that_kernels_are_tried_against(scoring: Scoring) -> None:
    q, k, v = (torch.randn(size, heads, 16) for size, heads in ((10, 4), (12, 2), (12, 2)))
    bounds = [torch.tensor(ends, dtype=torch.int32) for ends in ([0, 4, 10], [0, 6, 12])]
    lengths = Lengths(queries=bounds[0], keys=bounds[1], max_queries=6, max_keys=6)
    ours, expected = (kernel(q, k, v, lengths, scoring) for kernel in (flash_attention.by_formula, plain))
    torch.testing.assert_close(ours, expected)


def test_an_older_gpu_and_a_missing_package_leave_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_attention, "by_flash_attention_4", failing)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert flash_attention._kernel_of(KIND, "auto") is plain
    flash_attention._kernel_of.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(flash_attention, "_is_installed", lambda: False)
    assert flash_attention._kernel_of(KIND, "auto") is plain
    flash_attention.choose("torch")
    with pytest.raises(EnvironmentLackError, match=r"install paceline\[cuda\]"):
        flash_attention.choose("flash_attention_4")


def test_another_package_of_the_name_that_does_not_load_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # the package is not there, after all

    def broken(name: str) -> None:
        raise ImportError(f"{name}: undefined symbol")

    monkeypatch.setattr("importlib.util.find_spec", broken)
    flash_attention._is_installed.cache_clear()
    assert not flash_attention._is_installed()
    flash_attention._is_installed.cache_clear()


def test_the_choice_is_what_attention_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[str] = []

    def named(name: str) -> Callable[..., Tensor]:
        def kernel(*args: Any) -> Tensor:
            taken.append(name)
            return plain(*args)

        return kernel

    monkeypatch.setattr(flash_attention, "by_torch", named("torch"))
    monkeypatch.setattr(flash_attention, "by_flash_attention_4", named("four"))
    q, k, v = (torch.randn(10, heads, 16) for heads in (4, 2, 2))
    bounds = torch.tensor([0, 4, 10], dtype=torch.int32)
    lengths = Lengths(queries=bounds, keys=bounds, max_queries=6, max_keys=6)
    for choice, expected in (("auto", "four"), ("torch", "torch")):
        flash_attention.choose(choice)  # type: ignore[arg-type]
        flash_attention.attend(q, k, v, lengths, Scoring())
        assert taken[-1] == expected
    num_tries = len(taken)
    flash_attention.attend(q, k, v, lengths, Scoring())
    assert len(taken) == num_tries + 1  # tried once


def test_a_trial_within_a_recomputed_layer_saves_nothing_for_its_backward_pass() -> None:
    def layer(x: Tensor) -> Tensor:
        assert flash_attention._kernel_of(KIND, "auto") is plain
        return x.sin().square()

    x = torch.randn(5, requires_grad=True)
    out = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
    assert isinstance(out, Tensor)
    (gradient,) = torch.autograd.grad(out.sum(), x)
    torch.testing.assert_close(gradient, 2 * x.sin() * x.cos())


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (
            Qwen2Config(num_attention_heads=28, num_key_value_heads=4, hidden_size=3584),
            [(28, 4, 128, 128, False)],
        ),
        (MistralConfig(sliding_window=4096), [(32, 8, 128, 128, True)]),
        (MistralConfig(sliding_window=None), [(32, 8, 128, 128, False)]),
        (
            Gemma3TextConfig(num_attention_heads=4, num_key_value_heads=1, head_dim=256, num_hidden_layers=7),
            [(4, 1, 256, 256, False), (4, 1, 256, 256, True)],
        ),
        (Gemma2Config(), [(8, 4, 256, 256, False), (8, 4, 256, 256, True)]),
        (MambaConfig(), []),
        (DeepseekV3Config(), [(128, 128, 192, 128, False)]),
    ],
    ids=["Qwen2.5-7B", "Mistral", "Mistral without windows", "Gemma 3", "softcap", "no attention", "latent"],
)
def test_kinds_of_models(config: Any, expected: list[tuple[Any, ...]]) -> None:
    kinds = flash_attention.kinds_of(config, torch.bfloat16, CPU)
    assert [
        (kind.heads, kind.groups, kind.width, kind.value_width, kind.windowed) for kind in kinds
    ] == expected
    caps = {kind.softcap for kind in kinds}
    assert caps <= ({50.0} if isinstance(config, Gemma2Config) else {None})


def test_kernels_are_compiled_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[Kind] = []
    monkeypatch.setattr(flash_attention, "_kernel_of", lambda kind, chosen: tried.append(kind))
    flash_attention.prepare(Qwen2Config(), torch.bfloat16, CPU)
    flash_attention.prepare(Qwen2Config(), torch.float32, torch.device("cuda"))
    flash_attention.prepare(Qwen2Config(hidden_size=192), torch.bfloat16, torch.device("cuda"))  # heads of 6
    assert tried == []
    flash_attention.prepare(Qwen2Config(), torch.bfloat16, torch.device("cuda"))
    assert [kind.heads for kind in tried] == [32]
    monkeypatch.undo()  # the fixture ends with the true `_kernel_of`
