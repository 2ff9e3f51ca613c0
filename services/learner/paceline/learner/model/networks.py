"""Wraps transformers models as a policy, which scores tokens, and a critic, which values states."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.config.training.memory import KEPT_LOGITS_SHARE
from paceline.core.errors import ModelError
from paceline.learner.batch.pack import pack
from paceline.learner.batch.types import MicroBatch
from paceline.learner.distributed.catching_up import CountedGroup
from paceline.learner.distributed.context import put_together
from paceline.learner.distributed.mesh import RankGroup
from paceline.learner.logits.log_probs import bounded, chunked_log_probs, token_log_probs
from paceline.learner.model.architectures import logit_scale, logit_softcap
from paceline.learner.model.decoder.router_replay import give_choices, use_given_choices
from paceline.learner.model.decoder.rows import take_rows
from paceline.learner.model.image_states import embed_with_images

MAX_LOGITS_ELEMENTS = {"cpu": 1 << 26, "cuda": 1 << 28}
"""Elements in a chunk of logits (tokens x vocabulary): 256 MiB in float32, 512 MiB in bfloat16."""


class TokenScores(NamedTuple):
    """What a policy says about n response tokens, in float32.

    Attributes:
        log_probs: (n,), of the tokens.
        entropy: (n,), or None if it was not asked for.
        top_k: (n, K + 1), log-probs of a teacher's K likeliest tokens and, last, of all others together; None
            if they were not asked for.
    """

    log_probs: Tensor
    entropy: Tensor | None = None
    top_k: Tensor | None = None


class PolicyNetwork(nn.Module):
    """A causal language model whose forward pass returns log-probs of response tokens, never all logits.

    Args:
        lm: the transformers model; its parameters keep their Hugging Face names under `lm`.

    Attributes:
        token_multiple: the body runs on a multiple of this number of tokens.
        context: ranks that share the tokens of a micro-batch; None if this rank computes all of them.
        replaying: the routers that send tokens to the experts that the engine chose; empty for none.
    """

    def __init__(self, lm: nn.Module) -> None:
        super().__init__()
        self.lm = lm
        self.token_multiple = 1
        self.context: RankGroup | None = None
        self.replaying: tuple[nn.Module, ...] = ()

    def replay_choices(self) -> None:
        """Sends tokens to the experts that the engine chose from now on; see `use_given_choices`."""
        self.replaying = tuple(use_given_choices(self.lm))

    def forward(
        self,
        batch: MicroBatch,
        temperature: float = 1.0,
        with_entropy: bool = False,
        top_ids: Tensor | None = None,
    ) -> TokenScores:
        """Scores the n response tokens; with `top_ids`, (n, K), also those tokens, and with entropies."""
        own = hidden_states(body_of(self.lm), batch, self.token_multiple, self.context, self.replaying)
        ids = None if top_ids is None else own.part_of(top_ids)
        scores = self._score(own.states, own.part_of(batch.targets), temperature, with_entropy, ids)
        return TokenScores(
            own.put_together(scores.log_probs),
            *(None if part is None else own.put_together(part) for part in scores[1:]),
        )

    def _score(
        self, hidden: Tensor, targets: Tensor, temperature: float, with_entropy: bool, top_ids: Tensor | None
    ) -> TokenScores:
        head = output_head(self.lm)
        num_logits = hidden.shape[0] * head.vocab_size
        most = MAX_LOGITS_ELEMENTS[hidden.device.type]
        if hidden.device.type == "cuda" and num_logits * hidden.itemsize <= kept_logits_bytes(hidden.device):
            most = max(most, num_logits)
        temperature, chunk_size = temperature / head.scale, max(1, most // head.vocab_size)
        if top_ids is None and hidden.device.type == "cpu" and num_logits <= most:
            # Autograd keeps the logits, which saves computing them again.
            logits = F.linear(hidden, head.weight, head.bias)
            return TokenScores(
                *token_log_probs(bounded(logits, head.softcap), targets, temperature, with_entropy)
            )
        # Copies, not views: see ValueNetwork.
        log_probs, *others = chunked_log_probs(
            hidden,
            head.weight,
            targets,
            temperature,
            chunk_size,
            with_entropy or top_ids is not None,
            bias=head.bias,
            softcap=head.softcap,
            top_ids=top_ids,
        )
        return TokenScores(log_probs.clone(), *(None if part is None else part.clone() for part in others))


@lru_cache
def kept_logits_bytes(device: torch.device) -> int:
    """Returns the largest size of logits that a GPU keeps for the backward pass."""
    return int(KEPT_LOGITS_SHARE * torch.cuda.get_device_properties(device).total_memory)


class ValueNetwork(nn.Module):
    """Computes a value per position with a transformers body.

    Args:
        lm: the transformers model; its language-model head is dropped.
        hidden_size: width of the body's states.

    Attributes:
        token_multiple: the body runs on a multiple of this number of tokens.
        context: ranks that share the tokens of a micro-batch; None if this rank computes all of them.
    """

    def __init__(self, lm: nn.Module, hidden_size: int, *, has_bias: bool = True) -> None:
        super().__init__()
        # The attribute is named as in the checkpoint ("model"), so tensor names stay the same.
        self.prefix = str(getattr(lm, "base_model_prefix", "model"))
        setattr(self, self.prefix, body_of(lm))
        self.value_head = nn.Linear(hidden_size, 1, bias=has_bias)
        self.token_multiple = 1
        self.context: RankGroup | None = None

    @property
    def body(self) -> nn.Module:
        """The transformers model without a head."""
        body: nn.Module = getattr(self, self.prefix)
        return body

    def forward(self, batch: MicroBatch) -> Tensor:
        """Returns values (n,) in float32 of the states that precede the response tokens."""
        own = hidden_states(self.body, batch, self.token_multiple, self.context)
        values: Tensor = self.value_head(own.states)
        # A copy, because FSDP's hooks fail on in-place changes of a view that a sharded module returns.
        return own.put_together(values.float().squeeze(-1).clone())


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class OwnStates:
    """This rank's last hidden states at positions that predict response tokens.

    Attributes:
        states: (m, H).
        places: (m,), index in 0..n-1 of the response token that each state predicts, n if it predicts
            none; None if the states predict all n tokens in order.
        num_targets: n, the number of response tokens of the micro-batch.
        group: the ranks that compute the other states.
    """

    states: Tensor
    num_targets: int
    places: Tensor | None = None
    group: RankGroup | None = None

    def part_of(self, flat: Tensor) -> Tensor:
        """Selects this rank's part, (m, ...), of numbers per response token, (n, ...)."""
        if self.places is None:
            return flat
        return torch.cat([flat, flat.new_zeros(1, *flat.shape[1:])])[self.places]

    def put_together(self, own: Tensor) -> Tensor:
        """Gathers numbers of all response tokens, (n, ...), from the (m, ...) of each rank."""
        if self.places is None or self.group is None:
            return own
        return put_together(own, self.places, self.num_targets, self.group)


def hidden_states(
    body: nn.Module,
    batch: MicroBatch,
    token_multiple: int = 1,
    context: RankGroup | None = None,
    replaying: Sequence[nn.Module] = (),
) -> OwnStates:
    """Runs the body; each rank of `context` computes an equal run of the tokens.

    Adds a filler sequence to reach a multiple of `token_multiple` tokens on each rank. A rank that is absent
    from its group (`CountedGroup`) computes masked tokens in place of its own.
    """
    multiple = token_multiple if context is None else token_multiple * context.size
    if isinstance(context, CountedGroup) and context.exchanges.is_absent:
        context.exchanges.num_tokens = -(-batch.input_ids.shape[1] // multiple) * token_multiple
        filler = _own_states(body, pack([], batch.input_ids.device), multiple, context, replaying)
        num_targets = len(batch.score_positions)
        nowhere = batch.score_positions.new_tensor([num_targets])
        return replace(filler, num_targets=num_targets, places=nowhere)
    return _own_states(body, batch, multiple, context, replaying)


def _own_states(
    body: nn.Module,
    batch: MicroBatch,
    multiple: int,
    context: RankGroup | None,
    replaying: Sequence[nn.Module],
) -> OwnStates:
    """Runs the body, with fillers up to a multiple of `multiple` tokens; returns states without fillers."""
    input_ids, position_ids, packed = batch.input_ids, batch.position_ids, batch.packed
    if multiple > 1:
        num_missing = -input_ids.shape[1] % multiple
        input_ids = F.pad(input_ids, (0, num_missing))
        more = torch.arange(num_missing, device=position_ids.device).unsqueeze(0)
        # Always concatenated, because compiled layers depend on whether their input is a view.
        position_ids = torch.cat([position_ids, more.expand(*position_ids.shape[:-1], -1)], dim=-1)
        packed = packed.followed_by(num_missing) if num_missing else packed
    start, length = 0, input_ids.shape[1]
    embedded = embed_with_images(body, input_ids, batch.images)
    if context is not None:
        length //= context.size
        start = context.rank * length
        input_ids = input_ids[:, start : start + length]
        position_ids = position_ids[..., start : start + length]
    inputs = {"input_ids": input_ids} if embedded is None else embedded.part(start, length)
    packed = packed.for_pass(context)
    if replaying:
        give_choices(replaying, batch.expert_choices, length, start)
    output = decoder_of(body)(**inputs, position_ids=position_ids, use_cache=False, packed=packed)
    states: Tensor = output.last_hidden_state[0]
    positions, places = batch.score_positions, None
    if context is not None:
        positions = positions - start
        places = _places_within(positions, len(states))
        positions = F.pad(positions, (0, 1))[places]
    if batch.packed.keys is None:
        scored = states.index_select(0, positions)
    else:  # a shared prompt's last state scores the first token of several responses
        scored = take_rows(states, positions)
    return OwnStates(states=scored, num_targets=len(batch.score_positions), places=places, group=context)


def _places_within(positions: Tensor, length: int) -> Tensor:
    """Returns the indices of positions within 0..length-1; [n] if there are none: kernels need an entry."""
    places = ((positions >= 0) & (positions < length)).nonzero().squeeze(1)
    return places if len(places) else places.new_tensor([len(positions)])


def body_of(lm: nn.Module) -> nn.Module:
    """Returns the model without its head.

    Raises:
        ModelError: the model is not a causal language model with a body and a head.
    """
    body = getattr(lm, str(getattr(lm, "base_model_prefix", "model")), None)
    if not isinstance(body, nn.Module):
        raise ModelError(
            f"{type(lm).__name__} is not a causal language model of a body and a head; use one of the "
            "architectures of docs/models.md"
        )
    return body


def decoder_of(body: nn.Module) -> nn.Module:
    """Returns the part of the body that computes on tokens: all of it, unless it has a vision tower."""
    decoder: nn.Module = getattr(body, "language_model", body)
    return decoder


def decoder_layers(body: nn.Module) -> nn.ModuleList:
    """Returns the decoder layers, which are sharded separately.

    Raises:
        ModelError: the model has no list of decoder layers under `layers`.
    """
    layers = getattr(decoder_of(body), "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise ModelError(
            f"{type(body).__name__} has no list of decoder layers; use one of the architectures of "
            "docs/models.md"
        )
    return layers


@contextmanager
def first_layers(body: nn.Module) -> Iterator[None]:
    """Makes passes end after the body's first layers: at least two, and one of every kind."""
    config: Any = body.config.get_text_config()  # type: ignore[operator, union-attr]
    sorts = getattr(config, "layer_types", None) or ()
    kinds: dict[object, int] = {}
    for number, layer in enumerate(decoder_layers(body)):
        kinds.setdefault((*sorts[number : number + 1], *_parts(layer)), number)
    num_layers = config.num_hidden_layers
    if not getattr(config, "hidden_size_per_layer_input", 0):  # Gemma 4 splits embeddings by this number
        config.num_hidden_layers = min(num_layers, max(2, 1 + max(kinds.values())))
    try:
        yield
    finally:
        config.num_hidden_layers = num_layers


def _parts(layer: nn.Module) -> Iterator[tuple[object, ...]]:
    """Yields properties that are equal for layers with the same code."""
    for name, module in layer.named_modules():
        yield name, type(module), getattr(module, "sliding_window", None)
    for name, parameter in layer.named_parameters():
        yield name, parameter.shape


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class OutputHead:
    """Computes logits scale c tanh(x / c) with x = h weight^T + bias; without a softcap, scale x.

    Attributes:
        weight: (V, H).
        bias: (V,) or None.
        scale: factor of the logits, above 0.
        softcap: c, applied before the factor; None: no softcap.
    """

    weight: Tensor
    bias: Tensor | None
    scale: float
    softcap: float | None

    @property
    def vocab_size(self) -> int:
        """The number of token ids for which the head gives logits."""
        return int(self.weight.shape[0])


def output_head(lm: nn.Module) -> OutputHead:
    """Returns the head of a language model.

    Raises:
        ModelError: the head is not a linear layer.
    """
    find: Any = getattr(lm, "get_output_embeddings", None)
    head = None if find is None else find()
    if not isinstance(head, nn.Linear):
        raise ModelError(
            f"{type(lm).__name__} has no linear language-model head; use one of the architectures of "
            "docs/models.md"
        )
    scale, softcap = logit_scale(lm.config), logit_softcap(lm.config)
    softcap = None if softcap is None else softcap / scale
    return OutputHead(weight=head.weight, bias=head.bias, scale=scale, softcap=softcap)


def hidden_size(config: Any) -> int:
    """Returns the width of a model's hidden states."""
    return int(config.get_text_config().hidden_size)


def num_parameters(network: nn.Module) -> int:
    """Counts the parameters over all ranks; tied ones count once."""
    return sum(parameter.numel() for parameter in network.parameters())
