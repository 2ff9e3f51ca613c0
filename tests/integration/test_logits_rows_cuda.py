"""The kernels over rows of logits give what plain torch gives in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from paceline.learner.logits.log_probs import chunked_log_probs, token_log_probs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

TEMPERATURE = 0.7


def draw(tokens: int, hidden: int, vocab: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator("cuda").manual_seed(tokens)
    states = torch.randn(tokens, hidden, generator=generator, device="cuda").to(dtype)
    head = (torch.randn(vocab, hidden, generator=generator, device="cuda") / hidden**0.5 * 3).to(dtype)
    return states, head, torch.randint(vocab, (tokens,), generator=generator, device="cuda")


@pytest.mark.parametrize(
    ("tokens", "vocab", "chunk"), [(1, 17, 8), (37, 4096, 16), (65, 50257, 64), (65, 50257, 65)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_and_gradients_equal_float64(tokens: int, vocab: int, chunk: int, dtype: torch.dtype) -> None:
    states, head, targets = draw(tokens, 64, vocab, dtype)
    states.requires_grad_()
    head.requires_grad_()
    # The logits are rounded to their type before anything is made of them: so must the reference's be.
    logits = (states.detach() @ head.detach().t()).double().requires_grad_()
    true, true_entropy = token_log_probs(logits, targets, TEMPERATURE, True)
    log_probs, entropy, _ = chunked_log_probs(states, head, targets, TEMPERATURE, chunk, True)
    assert true_entropy is not None
    assert entropy is not None
    torch.testing.assert_close(log_probs.double(), true, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy.double(), true_entropy, rtol=1e-5, atol=2e-5)

    weights = torch.linspace(-1, 1, tokens, device="cuda")
    torch.autograd.backward((log_probs * weights).sum() + 0.3 * (entropy * weights.square()).sum())
    torch.autograd.backward((true * weights).sum() + 0.3 * (true_entropy * weights.double().square()).sum())
    assert logits.grad is not None
    tolerance = {"rtol": 1e-4, "atol": 1e-4} if dtype is torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(states.grad.double(), logits.grad @ head.detach().double(), **tolerance)  # type: ignore[union-attr, arg-type]
    torch.testing.assert_close(head.grad.double(), logits.grad.t() @ states.detach().double(), **tolerance)  # type: ignore[union-attr, arg-type]


@pytest.mark.parametrize(("tokens", "vocab", "chunk"), [(37, 4096, 16), (65, 50257, 64), (65, 50257, 65)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_teachers_tokens_equal_float64(tokens: int, vocab: int, chunk: int, dtype: torch.dtype) -> None:
    """Half of the sampled tokens are among the teacher's, and all others have a gradient, too."""
    states, head, targets = draw(tokens, 64, vocab, dtype)
    states.requires_grad_()
    head.requires_grad_()
    logits = (states.detach() @ head.detach().t()).double().requires_grad_()
    ids = torch.randn(tokens, vocab, device="cuda").topk(20).indices
    targets[::2] = ids[::2, 3]
    log_p = torch.log_softmax(logits, -1)
    rest = torch.ones_like(log_p, dtype=torch.bool).scatter(-1, ids, False)
    others = log_p.masked_fill(~rest, -torch.inf).logsumexp(-1, keepdim=True)
    true = torch.cat([log_p.gather(-1, ids), others], -1)
    sampled, entropy, top_k = chunked_log_probs(states, head, targets, 1.0, chunk, True, top_ids=ids)
    torch.testing.assert_close(top_k.double(), true, rtol=1e-5, atol=2e-5)

    weights = torch.linspace(-1, 1, tokens * 21, device="cuda").view(tokens, 21)
    torch.autograd.backward((top_k * weights).sum() + 0.2 * sampled.sum() + 0.1 * entropy.sum())
    written = log_p.gather(-1, targets[:, None]).sum(), -(log_p.exp() * log_p).sum()
    torch.autograd.backward((true * weights.double()).sum() + 0.2 * written[0] + 0.1 * written[1])
    assert logits.grad is not None
    tolerance = {"rtol": 1e-4, "atol": 1e-4} if dtype is torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(states.grad.double(), logits.grad @ head.detach().double(), **tolerance)  # type: ignore[union-attr, arg-type]
    torch.testing.assert_close(head.grad.double(), logits.grad.t() @ states.detach().double(), **tolerance)  # type: ignore[union-attr, arg-type]


def test_log_probs_have_the_same_bits_with_and_without_entropy() -> None:
    states, head, targets = draw(300, 128, 32000, torch.bfloat16)
    with_entropy, _, _ = chunked_log_probs(states, head, targets, 1.0, 300, True)
    again, _, _ = chunked_log_probs(states, head, targets, 1.0, 300, False)
    assert torch.equal(with_entropy, again)


def test_excluded_tokens_and_extreme_logits_stay_finite() -> None:
    head = torch.eye(8, device="cuda")
    states = torch.zeros(3, 8, device="cuda")
    states[0, 1] = -torch.inf
    states[1, 2] = 3e4
    states = states.nan_to_num(neginf=-3e38).requires_grad_()
    targets = torch.tensor([0, 2, 3], device="cuda")
    log_probs, entropy, _ = chunked_log_probs(states, head, targets, 1.0, 2, True)
    assert entropy is not None
    torch.autograd.backward(log_probs.sum() + entropy.sum())
    expected = -torch.tensor([7.0, 1.0, 8.0]).log()
    torch.testing.assert_close(log_probs.cpu(), expected)
    assert bool(torch.isfinite(states.grad).all())  # type: ignore[arg-type]


def test_a_single_chunk_keeps_its_logits_and_several_do_not() -> None:
    states, head, targets = draw(64, 128, 32000, torch.bfloat16)
    states.requires_grad_()
    torch.cuda.synchronize()
    sizes = []
    for chunk in (64, 63):
        before = torch.cuda.memory_allocated()
        log_probs, _, _ = chunked_log_probs(states, head, targets, 1.0, chunk)
        sizes.append(torch.cuda.memory_allocated() - before)
        (gradient,) = torch.autograd.grad(log_probs.sum(), states)
        assert torch.isfinite(gradient).all()
        del log_probs, gradient
    assert sizes[0] - sizes[1] >= 64 * 32000 * 2
