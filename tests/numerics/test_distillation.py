"""Distillation from a teacher's likeliest tokens: values and gradients against the whole vocabulary."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from paceline.algorithms.policy_losses import LossInputs, TopK, distill
from paceline.algorithms.policy_losses.top_k import REST_FLOOR, log_rest
from paceline.core.errors import ConfigError, NumericsError
from paceline.learner.logits.log_probs import chunked_log_probs

pytestmark = pytest.mark.torch

KINDS = ["reverse", "forward", "jsd"]


def buckets(log_p: Tensor, ids: Tensor) -> Tensor:
    """Log-probs of chosen tokens and of all others, whose probabilities are added up one by one."""
    rest = torch.ones_like(log_p, dtype=torch.bool).scatter(-1, ids, False)
    others = log_p.masked_fill(~rest, -math.inf).logsumexp(-1, keepdim=True)
    return torch.cat([log_p.gather(-1, ids), others], dim=-1)


def divergence(log_p: Tensor, log_q: Tensor, kl: str, beta: float = 0.5) -> Tensor:
    """The textbook's formulas, of probabilities."""
    p, q = log_p.exp(), log_q.exp()
    m = beta * q + (1 - beta) * p
    return {
        "reverse": (p * (p / q).log()).sum(-1),
        "forward": (q * (q / p).log()).sum(-1),
        "jsd": beta * (q * (q / m).log()).sum(-1) + (1 - beta) * (p * (p / m).log()).sum(-1),
    }[kl]


def loss_inputs(top_k: TopK | None, mask: Tensor) -> LossInputs:
    nothing = torch.zeros(mask.shape)
    return LossInputs(
        log_probs=nothing, log_probs_of={"old": nothing}, advantages=nothing, mask=mask, top_k=top_k
    )


@pytest.mark.parametrize("kl", KINDS)
@pytest.mark.parametrize(("chunk_size", "softcap"), [(3, None), (100, None), (4, 2.0)])
def test_the_head_and_the_loss_have_the_gradient_of_the_written_out_divergence(kl, chunk_size, softcap):
    """In float64; sampled tokens are among the teacher's likeliest ones in some rows, and not in others."""
    generator = torch.Generator().manual_seed(3)
    hidden, weight, bias = (
        torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)
        for shape in ((7, 4), (11, 4), (11,))
    )
    teacher = torch.log_softmax(torch.randn(7, 11, generator=generator, dtype=torch.float64) * 2, -1)
    ids = teacher.topk(3).indices
    targets = torch.cat([ids[:3, 1], teacher.argmin(-1)[3:]])
    logits = hidden @ weight.t() + bias
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    log_p = torch.log_softmax(logits, -1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    factors = torch.randn(7, generator=generator, dtype=torch.float64)
    true_loss = divergence(buckets(log_p, ids), buckets(teacher, ids), kl)
    sampled = log_p.gather(-1, targets[:, None])[:, 0]
    true = (true_loss * factors + 0.3 * sampled + 0.2 * entropy).sum()

    got_sampled, got_entropy, top_k = chunked_log_probs(
        hidden, weight, targets, 1.0, chunk_size, True, bias=bias, softcap=softcap, top_ids=ids
    )
    torch.testing.assert_close(top_k, buckets(log_p, ids), rtol=1e-10, atol=1e-12)
    tables = TopK(policy=top_k[None], teacher=buckets(teacher, ids)[None])
    loss = distill(loss_inputs(tables, torch.ones(1, 7, dtype=torch.bool)), kl=kl).loss[0]
    torch.testing.assert_close(loss, true_loss, rtol=1e-10, atol=1e-12)
    got = (loss * factors + 0.3 * got_sampled + 0.2 * got_entropy).sum()
    for got_gradient, written in zip(
        torch.autograd.grad(got, (hidden, weight, bias)),
        torch.autograd.grad(true, (hidden, weight, bias)),
        strict=True,
    ):
        torch.testing.assert_close(got_gradient, written, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("kl", KINDS)
def test_bfloat16_logits_have_the_gradient_of_their_own_values(kl):
    """The logits' gradient, in bfloat16, is the rounded float64 one, for the teacher's tokens and others."""
    generator = torch.Generator().manual_seed(5)
    rows, weight = torch.eye(6, dtype=torch.bfloat16), torch.randn(40, 6, generator=generator).bfloat16()
    teacher = torch.log_softmax(torch.randn(6, 40, generator=generator, dtype=torch.float64), -1)
    ids, targets = teacher.topk(5).indices, torch.arange(6)
    hidden = rows.clone().requires_grad_()
    head = weight.clone().requires_grad_()
    _, _, top_k = chunked_log_probs(hidden, head, targets, with_entropy=True, top_ids=ids)
    tables = TopK(policy=top_k[None], teacher=buckets(teacher, ids).float()[None])
    distill(loss_inputs(tables, torch.ones(1, 6, dtype=torch.bool)), kl=kl).loss.sum().backward()
    logits = weight.double().t().clone().requires_grad_()
    log_p = torch.log_softmax(logits, -1)
    divergence(buckets(log_p, ids), buckets(teacher, ids), kl).sum().backward()
    # The rows are unit vectors, so the head's gradient is that of the logits.
    assert head.grad is not None and logits.grad is not None  # noqa: PT018
    torch.testing.assert_close(head.grad.t().double(), logits.grad, rtol=8e-3, atol=1e-5)


def test_sampled_tokens_and_entropies_are_those_without_a_teacher_to_the_bit():
    torch.manual_seed(0)
    hidden, weight, targets = torch.randn(9, 5), torch.randn(30, 5), torch.randint(30, (9,))
    ids = torch.randn(9, 30).topk(4).indices
    alone = chunked_log_probs(hidden, weight, targets, 1.0, 4, True)
    beside = chunked_log_probs(hidden, weight, targets, 1.0, 4, True, top_ids=ids)
    assert torch.equal(alone[0], beside[0])
    assert torch.equal(alone[1], beside[1])


def test_a_certain_policy_still_has_a_finite_loss_and_gradient():
    """All probability on one token; the teacher's is elsewhere."""
    logits = torch.zeros(1, 8)
    logits[0, 2] = 200.0
    ids = torch.tensor([[5, 6]])
    for kl in KINDS:
        hidden = torch.ones(1, 1, requires_grad=True)
        _, _, top_k = chunked_log_probs(hidden, logits.t(), torch.tensor([2]), with_entropy=True, top_ids=ids)
        teacher = torch.tensor([[0.6, 0.3, 0.1]]).log()
        tables = TopK(policy=top_k[None], teacher=teacher[None])
        loss = distill(loss_inputs(tables, torch.ones(1, 1, dtype=torch.bool)), kl=kl).loss
        (gradient,) = torch.autograd.grad(loss.sum(), hidden)
        assert torch.isfinite(loss).all()
        assert torch.isfinite(gradient).all()


def test_the_others_are_never_less_likely_than_float32_can_tell():
    certain = torch.tensor([[0.0, -40.0]], requires_grad=True)
    assert log_rest(certain).item() == pytest.approx(math.log(REST_FLOOR))
    assert log_rest(torch.tensor([0.5, 0.25]).log()).item() == pytest.approx(math.log(0.25))


@pytest.mark.parametrize("kl", KINDS)
def test_nothing_under_the_mask_counts(kl):
    mask = torch.tensor([[True, False]])
    teacher = torch.tensor([[[0.5, 0.3, 0.2], [math.nan] * 3]]).log()
    policy = torch.tensor([[[0.2, 0.3, 0.5], [math.nan] * 3]]).log().requires_grad_()
    loss, metrics = distill(loss_inputs(TopK(policy=policy, teacher=teacher), mask), kl=kl)
    loss.sum().backward()
    assert policy.grad is not None
    assert loss[0, 1] == 0
    assert (policy.grad[0, 1] == 0).all()
    assert loss[0, 0].item() == pytest.approx(divergence(policy[0, 0], teacher[0, 0], kl).item(), rel=1e-5)
    assert {name: value.item() for name, value in metrics.items()} == pytest.approx(
        {"ppo_kl": 0.0, "teacher_top_k_mass": 0.8, "policy_top_k_mass": 0.5}
    )


def test_a_jsd_leans_to_its_share():
    policy, teacher = torch.tensor([[[0.2, 0.3, 0.5]]]).log(), torch.tensor([[[0.5, 0.3, 0.2]]]).log()
    inputs = loss_inputs(TopK(policy=policy, teacher=teacher), torch.ones(1, 1, dtype=torch.bool))
    for beta in (0.1, 0.9):
        true = divergence(policy, teacher, "jsd", beta).item()
        assert distill(inputs, kl="jsd", beta=beta).loss.item() == pytest.approx(true, rel=1e-5)
    for beta in (0.0, 1.0):
        with pytest.raises(ConfigError, match="beta"):
            distill(inputs, kl="jsd", beta=beta)


def test_what_does_not_fit_is_refused():
    with pytest.raises(ConfigError, match=r"set algorithm\.teacher"):
        distill(loss_inputs(None, torch.ones(1, 1, dtype=torch.bool)))
    with pytest.raises(NumericsError, match="policy .* teacher"):
        TopK(policy=torch.zeros(1, 1, 3), teacher=torch.zeros(1, 1, 4))
    with pytest.raises(NumericsError, match="top_ids"):
        chunked_log_probs(
            torch.zeros(2, 3),
            torch.zeros(5, 3),
            torch.zeros(2, dtype=torch.int64),
            top_ids=torch.zeros(3, 1),
        )
