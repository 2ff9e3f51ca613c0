"""Token log-probs and entropy, plain and in chunks."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.core.errors import ConfigError, NumericsError
from paceline.learner.logits.log_probs import chunked_log_probs, token_log_probs

pytestmark = pytest.mark.torch


@pytest.mark.parametrize(("temperature", "p"), [(1.0, 0.75), (0.5, 0.9)])
def test_two_words_at_two_temperatures(temperature, p):
    logits = torch.tensor([[0.0, math.log(3.0)], [0.0, math.log(3.0)]])
    log_probs, entropy = token_log_probs(logits, torch.tensor([1, 0]), temperature, with_entropy=True)
    assert log_probs.tolist() == pytest.approx([math.log(p), math.log(1 - p)])
    assert entropy.tolist() == pytest.approx([-p * math.log(p) - (1 - p) * math.log(1 - p)] * 2)


def test_bf16_logits_are_scored_in_float32_and_entropy_does_not_change_the_bits():
    torch.manual_seed(0)
    logits, targets = (torch.randn(3, 7, 50) * 5).bfloat16(), torch.randint(0, 50, (3, 7))
    alone, nothing = token_log_probs(logits, targets, 0.7)
    both, entropy = token_log_probs(logits, targets, 0.7, with_entropy=True)
    assert nothing is None
    assert torch.equal(alone, both)
    exact = torch.log_softmax(logits.double() / 0.7, -1)
    assert alone.dtype == torch.float32
    torch.testing.assert_close(
        alone.double(), exact.gather(-1, targets[..., None])[..., 0], rtol=0, atol=5e-6
    )
    torch.testing.assert_close(entropy.double(), -(exact.exp() * exact).sum(-1), rtol=0, atol=5e-6)


@pytest.mark.parametrize("chunked", [False, True])
def test_a_word_that_cannot_be_said_has_no_part_in_the_entropy_nor_in_its_gradient(chunked):
    logits = torch.tensor([[0.0, math.log(3.0), -math.inf]], requires_grad=True)
    targets = torch.tensor([1])
    if chunked:
        hidden = torch.ones(1, 1, requires_grad=True)
        log_probs, entropy, _ = chunked_log_probs(hidden, logits.detach().t(), targets, with_entropy=True)
    else:
        log_probs, entropy = token_log_probs(logits, targets, with_entropy=True)
        (log_probs + entropy).sum().backward()
        assert torch.isfinite(logits.grad).all()
    assert entropy.item() == pytest.approx(-0.75 * math.log(0.75) - 0.25 * math.log(0.25))


@pytest.mark.parametrize("with_entropy", [False, True])
def test_gradcheck_of_both_forms(with_entropy):
    torch.manual_seed(0)
    hidden = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, 6, (5,))

    def plain(h, w):
        return [x for x in token_log_probs(h @ w.t(), targets, 0.8, with_entropy) if x is not None]

    def chunked(h, w):
        return [x for x in chunked_log_probs(h, w, targets, 0.8, 2, with_entropy) if x is not None]

    assert torch.autograd.gradcheck(lambda *args: tuple(plain(*args)), (hidden, weight))
    assert torch.autograd.gradcheck(lambda *args: tuple(chunked(*args)), (hidden, weight))


@pytest.mark.parametrize("chunk_size", [1, 4, 10, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_chunks_give_what_the_plain_form_gives_gradients_too(chunk_size, temperature):
    torch.manual_seed(0)
    hidden = torch.randn(2, 5, 8, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(11, 8, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, 11, (2, 5))
    seeds = torch.randn(2, 2, 5, dtype=torch.float64)
    plain = token_log_probs(hidden @ weight.t(), targets, temperature, with_entropy=True)
    chunked = chunked_log_probs(hidden, weight, targets, temperature, chunk_size, with_entropy=True)[:2]
    for single, other in zip(plain, chunked, strict=True):
        torch.testing.assert_close(single, other, rtol=1e-12, atol=1e-12)
    wanted = torch.autograd.grad(plain, (hidden, weight), grad_outputs=tuple(seeds))
    got = torch.autograd.grad(chunked, (hidden, weight), grad_outputs=tuple(seeds))
    for single, other in zip(wanted, got, strict=True):
        torch.testing.assert_close(single, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("with_bias", "softcap"), [(True, None), (False, 1.5), (True, 1.5)])
@pytest.mark.parametrize("chunk_size", [3, 100])
def test_a_head_with_bias_and_bounded_logits(with_bias, softcap, chunk_size):
    """Against softcap tanh((h W + b) / softcap), written out, in float64; the gradients too."""
    generator = torch.Generator().manual_seed(2)
    shapes = ((7, 4), (11, 4), (11,))
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    hidden, weight, bias = (tensor.requires_grad_() for tensor in tensors)
    targets = torch.randint(11, (7,), generator=generator)
    logits = hidden @ weight.t() + (bias if with_bias else 0.0)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    log_p = torch.log_softmax(logits / 0.8, -1)
    expected = log_p.gather(-1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
    given = chunked_log_probs(
        hidden, weight, targets, 0.8, chunk_size, True, bias=bias if with_bias else None, softcap=softcap
    )[:2]
    for value, true in zip(given, expected, strict=True):
        torch.testing.assert_close(value, true, rtol=1e-12, atol=1e-12)
    seeds = [torch.randn(7, generator=generator, dtype=torch.float64) for _ in range(2)]
    inputs = (hidden, weight, bias) if with_bias else (hidden, weight)
    got = torch.autograd.grad(given, inputs, grad_outputs=seeds)
    for gradient, true in zip(got, torch.autograd.grad(expected, inputs, grad_outputs=seeds), strict=True):
        torch.testing.assert_close(gradient, true, rtol=1e-10, atol=1e-12)


def test_only_what_needs_a_gradient_gets_one():
    hidden, weight = torch.randn(3, 4, requires_grad=True), torch.randn(5, 4)
    log_probs, entropy, _ = chunked_log_probs(hidden, weight, torch.tensor([0, 1, 2]), with_entropy=True)
    (gradient,) = torch.autograd.grad(entropy.sum(), hidden, retain_graph=True)
    plain = token_log_probs(hidden @ weight.t(), torch.tensor([0, 1, 2]), with_entropy=True)[1]
    torch.testing.assert_close(gradient, torch.autograd.grad(plain.sum(), hidden)[0], rtol=1e-5, atol=1e-6)
    assert weight.grad is None
    assert log_probs.requires_grad


class LargestResult(TorchDispatchMode):
    """Notes the largest tensor that any operation gives."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.numel = max(self.numel, tensor.numel())
        return result


def test_no_tensor_of_tokens_times_vocabulary_is_ever_made():
    num_tokens, vocabulary, chunk_size = 64, 200, 4
    hidden = torch.randn(num_tokens, 3, requires_grad=True)
    weight = torch.randn(vocabulary, 3, requires_grad=True)
    targets = torch.randint(0, vocabulary, (num_tokens,))
    with LargestResult() as chunked:
        log_probs, entropy, _ = chunked_log_probs(hidden, weight, targets, 0.9, chunk_size, with_entropy=True)
        (log_probs + entropy).sum().backward()
    with LargestResult() as plain:
        log_probs, entropy = token_log_probs(hidden @ weight.t(), targets, 0.9, with_entropy=True)
        (log_probs + entropy).sum().backward()
    assert chunked.numel == chunk_size * vocabulary
    assert plain.numel == num_tokens * vocabulary


def test_wrong_arguments():
    with pytest.raises(ConfigError, match="temperature is 0"):
        token_log_probs(torch.zeros(1, 2), torch.tensor([0]), 0.0)
    with pytest.raises(NumericsError, match=r"targets of shape \(2,\) do not fit rows of shape \(1, 2\)"):
        token_log_probs(torch.zeros(1, 2), torch.tensor([0, 1]))
    with pytest.raises(NumericsError, match="size 3 do not fit a head of size 4"):
        chunked_log_probs(torch.zeros(1, 3), torch.zeros(5, 4), torch.tensor([0]))
    with pytest.raises(ConfigError, match="chunk_size is 0"):
        chunked_log_probs(torch.zeros(1, 3), torch.zeros(5, 3), torch.tensor([0]), chunk_size=0)
