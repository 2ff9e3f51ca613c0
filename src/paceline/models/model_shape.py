"""The sizes of a model that matter for memory, read from config.json only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.models.facts import family_of
from paceline.models.tower_shape import TowerShape

_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentShape:
    """The sizes of DeepSeek's latent attention (arXiv:2405.04434, section 2.1).

    Attributes:
        q_rank: rank of the queries' latent vector; 0: queries are projected from the states.
        kv_rank: rank of the latent vector from which keys and values are computed.
        rope: size of the part with positions in queries and keys; all heads share the key's.
        nope: size of the part without positions.
    """

    num_heads: int
    q_rank: int
    kv_rank: int
    rope: int
    nope: int
    value: int

    @classmethod
    def of(cls, tree: Mapping[str, Any]) -> LatentShape:
        """Reads the sizes from a model's config.json.

        Raises:
            KeyError, TypeError, ValueError: it has other names for its sizes.
        """
        return cls(
            num_heads=int(tree["num_attention_heads"]),
            q_rank=int(tree.get("q_lora_rank") or 0),
            kv_rank=int(tree["kv_lora_rank"]),
            rope=int(tree["qk_rope_head_dim"]),
            nope=int(tree["qk_nope_head_dim"]),
            value=int(tree["v_head_dim"]),
        )

    def matrices(self, hidden: int) -> dict[str, tuple[int, int]]:
        """Inputs and outputs of a layer's projections."""
        queries = self.num_heads * (self.nope + self.rope)
        from_states = {"q_proj": (hidden, queries)}
        by_latent = {"q_a_proj": (hidden, self.q_rank), "q_b_proj": (self.q_rank, queries)}
        return {
            **(by_latent if self.q_rank else from_states),
            "kv_a_proj_with_mqa": (hidden, self.kv_rank + self.rope),
            "kv_b_proj": (self.kv_rank, self.num_heads * (self.nope + self.value)),
            "o_proj": (self.num_heads * self.value, hidden),
        }

    @property
    def norms(self) -> int:
        """Total size of the latent vectors, and so of the weights of their norms."""
        return self.q_rank + self.kv_rank

    @property
    def activations(self) -> int:
        """Numbers per token that the projections keep for the backward pass.

        They are query, key, value and result of each head, the latent vectors, and what their norms keep.
        """
        return 2 * self.num_heads * (self.nope + self.rope + self.value) + 3 * self.norms

    @property
    def absorbed(self) -> int:
        """Numbers of a layer that an engine keeps twice, because it has its own form of `kv_b_proj`."""
        return self.kv_rank * self.num_heads * (self.nope + self.value)


@dataclass(frozen=True, kw_only=True, slots=True)
class AdaptedMatrix:
    """A kind of matrix that has adapters.

    Attributes:
        count: number of such matrices in all layers.
        is_expert: whether they are stacked, those of all experts of a layer in one parameter.
    """

    name: str
    inputs: int
    outputs: int
    count: int
    is_expert: bool = False

    @property
    def size(self) -> int:
        """Number of parameters of all such matrices."""
        return self.count * self.inputs * self.outputs

    def num_adapters(self, rank: int) -> int:
        """Returns the number of parameters of A and B of all such matrices."""
        return self.count * rank * (self.inputs + self.outputs)


def dense_size(num_layers: int, hidden: int) -> int:
    """Returns about how many parameters the layers of a dense model of this depth and width have."""
    return 12 * num_layers * hidden**2


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """The sizes of a decoder that matter for memory, and those of its vision tower.

    Attributes:
        intermediate: width of a layer's MLP, or of an expert.
        num_experts: number of experts per layer; 0 if there are none.
        num_chosen: number of experts that are active per token.
        divides_experts: whether the learner can divide them over ranks.
        shared: width of the MLP that all tokens use in addition to the experts.
        weighs_shared: whether that MLP has a weight per token, like an expert.
        num_dense: number of layers without experts in a model with experts; their MLPs have the width
            `dense`.
        has_plain_norms: whether queries and keys are normalised without weights.
        num_sinks: number of attention sinks (scores of tokens without a value) in a layer.
        clamps_mlp: whether an MLP keeps its clamped halves, too.
        has_all_biases: whether all projections, routers and experts have biases, not only queries, keys and
            values.
        latent: DeepSeek's attention; None for the usual one.
    """

    hidden: int
    intermediate: int
    num_layers: int
    attention_width: int
    kv_width: int
    vocab: int
    tied: bool
    has_bias: bool
    num_experts: int
    num_chosen: int = 0
    divides_experts: bool = False
    shared: int = 0
    weighs_shared: bool = False
    num_dense: int = 0
    dense: int = 0
    head_norms: int = 0
    has_plain_norms: bool = False
    num_sinks: int = 0
    clamps_mlp: bool = False
    has_all_biases: bool = False
    num_heads: int = 1
    latent: LatentShape | None = None
    tower: TowerShape | None = None

    @classmethod
    def of(cls, tree: Mapping[str, Any]) -> ModelShape | None:
        """Reads the shape from config.json; None if sizes have other names or differ between layers."""
        vision = tree.get("vision_config")
        if vision and not family_of(tree.get("model_type")).takes_images:
            return None
        is_tied = tree.get("tie_word_embeddings")
        tree = tree.get("text_config", tree)
        is_tied = tree.get("tie_word_embeddings", False) if is_tied is None else is_tied
        family = family_of(tree.get("model_type"))
        if family.has_layers_of_own_sizes:
            return None
        try:
            hidden, heads = int(tree["hidden_size"]), int(tree["num_attention_heads"])
            head_dim = int(tree.get("head_dim") or hidden // heads)
            num_layers = int(tree["num_hidden_layers"])
            dense = _number(tree, "intermediate_size_mlp", "intermediate_size")
            num_experts = _number(tree, *_NUM_EXPERTS)
            inner = _number(tree, "moe_intermediate_size") if num_experts else 0
            shared = _number(tree, "n_shared_experts") * inner
            if num_experts:
                shared = shared or _number(tree, "shared_expert_intermediate_size")
                shared = int(tree["intermediate_size"]) if family.has_shared_expert else shared
            latent = tree.get("kv_lora_rank")
            attention_width = heads * head_dim
            kv_width = int(tree.get("num_key_value_heads") or heads) * head_dim
            has_norms = family.has_head_norms or bool(tree.get("use_qk_norm"))
            norms = 2 * head_dim if has_norms and not family.has_plain_norms else 0
            return cls(
                hidden=hidden,
                intermediate=inner or int(tree["intermediate_size"]),
                num_layers=num_layers,
                attention_width=attention_width,
                num_heads=heads,
                kv_width=kv_width,
                vocab=int(tree["vocab_size"]),
                tied=bool(is_tied),
                has_bias=family.has_projection_bias or bool(tree.get("attention_bias")),
                num_experts=num_experts,
                num_chosen=_number(tree, "num_experts_per_tok"),
                divides_experts=num_experts > 0 and not family.joins_experts,
                shared=shared,
                weighs_shared=family.weighs_shared_expert,
                num_dense=num_layers - len(layers_with_experts(tree)) if num_experts else 0,
                dense=dense,
                head_norms=attention_width + kv_width if family.has_joint_norms else norms,
                has_plain_norms=has_norms and family.has_plain_norms,
                num_sinks=heads if family.has_sinks else 0,
                clamps_mlp=family.clamps_mlp,
                has_all_biases=family.has_all_biases,
                latent=LatentShape.of(tree) if latent else None,
                tower=TowerShape.of(vision) if vision else None,
            )
        except (KeyError, TypeError, ValueError):
            return None

    @property
    def layer(self) -> int:
        """Number of parameters of one layer; in a model with experts, of a layer with experts."""
        mlp = self.experts or 3 * self.hidden * self.intermediate
        shared = 3 * self.hidden * self.shared + (self.hidden if self.weighs_shared else 0)
        biases = self.num_experts if self.has_all_biases else 0
        return self._attention + mlp + shared + biases + self.hidden * (2 + self.num_experts)

    @property
    def experts(self) -> int:
        """Number of parameters of a layer's experts, without their router; 0 without experts."""
        biases = 2 * self.intermediate + self.hidden if self.has_all_biases else 0
        return self.num_experts * (3 * self.hidden * self.intermediate + biases)

    @property
    def _dense_layer(self) -> int:
        return self._attention + 3 * self.hidden * self.dense + 2 * self.hidden

    @property
    def _attention(self) -> int:
        if self.latent is not None:
            matrices = self.latent.matrices(self.hidden).values()
            return sum(inner * outer for inner, outer in matrices) + self.latent.norms
        projections = 2 * self.hidden * (self.attention_width + self.kv_width)
        biases = self.attention_width + 2 * self.kv_width if self.has_bias else 0
        biases += self.hidden if self.has_all_biases else 0
        return projections + biases + self.head_norms + self.num_sinks

    @property
    def num_in_matrices(self) -> int:
        """Number of parameters in the layers' matrices, except experts, which are stored together."""
        attention = self._attention
        if self.latent is not None:
            attention -= self.latent.norms
        else:
            attention = 2 * self.hidden * (self.attention_width + self.kv_width)
        mlp = self.shared * 3 + self.num_experts if self.num_experts else 3 * self.intermediate
        with_experts = self.num_layers - self.num_dense
        dense = self.num_dense * (attention + 3 * self.hidden * self.dense)
        return with_experts * (attention + self.hidden * mlp) + dense

    def divided(self, num_ranks: int) -> int:
        """Returns how many of a layer's parameters `learner.tensor_parallel` divides over this many ranks.

        Latent attention and attention with norms over all heads stay whole, and so do keys and values of
        fewer heads than ranks. Of a layer with experts, the MLP is the one that all tokens use.
        """
        head_dim = self.attention_width // self.num_heads
        attention = 0
        if self.latent is None and self.head_norms <= 2 * head_dim and self.num_heads % num_ranks == 0:
            has_own_keys = self.kv_width // head_dim % num_ranks == 0
            attention = self.attention_width + (self.kv_width if has_own_keys else 0)
        mlp = self.shared if self.num_experts else self.intermediate
        return self.hidden * (2 * attention + (3 * mlp if mlp % num_ranks == 0 else 0))

    @property
    def largest_matrix(self) -> int:
        """Upper bound on the size of a layer's largest matrix."""
        return self.hidden * max(self.intermediate, self.dense, self.attention_width, self.hidden)

    def activations(self, *, compiled: bool) -> int:
        """Returns numbers per token that a layer keeps for the backward pass.

        That is four times the width of the MLP (seven if it clamps) plus thirteen times that of the states,
        three of them in attention. If compiled, the factors are three and nine, because results that need no
        matrix product are recomputed. A token's states are copied to each of its experts and back.
        """
        states, inner = 6 if compiled else 10, self._kept_by_mlp(compiled=compiled)
        if self.latent is not None:
            attention = self.latent.activations
        else:
            attention, has_norms = 3 * self.attention_width, self.head_norms or self.has_plain_norms
            attention += 2 * (self.attention_width + self.kv_width) if has_norms else 0
        width = self.shared if self.num_experts else self.intermediate
        return inner * width + states * self.hidden + attention + self.of_experts(compiled=compiled)

    def of_experts(self, *, compiled: bool) -> int:
        """Returns the part of `activations` that a token's experts keep, with its states' copies."""
        if not self.num_experts:
            return 0
        width = self._kept_by_mlp(compiled=compiled) * self.intermediate
        return self.num_chosen * (width + 2 * self.hidden)

    def _kept_by_mlp(self, *, compiled: bool) -> int:
        """Returns the numbers that an MLP keeps for each number of its width."""
        return (3 if compiled else 4) + (3 if self.clamps_mlp else 0)

    def cached(self, num_ranks: int) -> int:
        """Returns numbers per token and layer in an engine's KV cache, which `num_ranks` GPUs share by heads.

        With latent attention, every GPU keeps the full latent vector.
        """
        if self.latent is not None:
            return self.latent.kv_rank + self.latent.rope
        return 2 * max(1, self.kv_width // num_ranks)

    @property
    def root(self) -> int:
        """Parameters outside the layers: embedding, head and last norm."""
        return self.vocab * self.hidden * (1 if self.tied else 2) + self.hidden

    @property
    def num_parameters(self) -> int:
        """Parameters of the decoder, all of which can train."""
        with_experts = self.num_layers - self.num_dense
        return with_experts * self.layer + self.num_dense * self._dense_layer + self.root

    @property
    def active_layers(self) -> int:
        """Parameters of all layers that are active for a token; of the experts, only the chosen ones."""
        idle = max(0, self.num_experts - self.num_chosen) * 3 * self.hidden * self.intermediate
        with_experts = self.num_layers - self.num_dense
        return with_experts * (self.layer - idle) + self.num_dense * self._dense_layer

    @property
    def active_parameters(self) -> int:
        """Parameters of the layers that are active for a token, and the head's."""
        return self.active_layers + self.vocab * self.hidden

    @property
    def idle_parameters(self) -> int:
        """Parameters of the layers that are not active for a token."""
        return self.num_parameters - self.root - self.active_layers

    @property
    def largest(self) -> int:
        """Size of the largest parameter: embedding, an MLP's matrix, or two matrices of all experts."""
        mlp = self.hidden * self.intermediate * (2 * self.num_experts or 1)
        return max(self.hidden * self.vocab, mlp)

    @property
    def num_in_tower(self) -> int:
        """Parameters of the vision tower."""
        return 0 if self.tower is None else self.tower.num_parameters

    def num_patches(self, num_tokens: int) -> int:
        """Returns the largest number of image patches in a prompt of `num_tokens` tokens."""
        return 0 if self.tower is None else num_tokens * self.tower.patches_per_token

    def num_adapted(self, targets: Sequence[str]) -> int:
        """Returns the size of the matrices that `model.lora.targets` name."""
        return sum(part.size for part in self.matrices(targets))

    def num_adapters(self, targets: Sequence[str], rank: int) -> int:
        """Returns the size of the adapters, A and B, of these matrices."""
        return sum(part.num_adapters(rank) for part in self.matrices(targets))

    def matrices(self, targets: Sequence[str]) -> list[AdaptedMatrix]:
        """Returns the matrices that adapters have; unknown names count as an MLP's."""
        hidden, with_experts = self.hidden, self.num_layers - self.num_dense
        fused = {"qkv_proj": (hidden, self.attention_width + 2 * self.kv_width)}
        parts = [(self._projections, self.num_layers, False)]
        if self.num_experts:
            stacks = {
                "gate_up_proj": (hidden, 2 * self.intermediate),
                "down_proj": (self.intermediate, hidden),
            }
            parts.append((stacks, with_experts * self.num_experts, True))
            parts += [(_mlp(hidden, self.shared), with_experts, False)] if self.shared else []
            parts += [(_mlp(hidden, self.dense), self.num_dense, False)] if self.num_dense else []
        else:
            fused["gate_up_proj"] = (hidden, 2 * self.intermediate)
            parts.append((_mlp(hidden, self.intermediate), self.num_layers, False))
        matrices = [
            AdaptedMatrix(name=name, inputs=shape[0], outputs=shape[1], count=count, is_expert=is_expert)
            for shapes, count, is_expert in parts
            for name, shape in shapes.items()
            if "all" in targets or name in targets
        ]
        for name in {*targets} - {"all"} - {part.name for part in matrices}:
            inputs, outputs = fused.get(name, (hidden, self.intermediate))
            matrices.append(AdaptedMatrix(name=name, inputs=inputs, outputs=outputs, count=self.num_layers))
        return matrices

    @property
    def _projections(self) -> dict[str, tuple[int, int]]:
        """Inputs and outputs of a layer's attention."""
        if self.latent is not None:
            return self.latent.matrices(self.hidden)
        attention, kv = self.attention_width, self.kv_width
        keys = dict.fromkeys(("k_proj", "v_proj"), (self.hidden, kv))
        return {"q_proj": (self.hidden, attention), **keys, "o_proj": (attention, self.hidden)}


def _mlp(hidden: int, width: int) -> dict[str, tuple[int, int]]:
    """Returns inputs and outputs of an MLP's matrices."""
    return {"gate_proj": (hidden, width), "up_proj": (hidden, width), "down_proj": (width, hidden)}


def _number(tree: Mapping[str, Any], *names: str) -> int:
    """Returns the first of these sizes that config.json has; 0 if it has none of them."""
    return int(next((tree[name] for name in names if tree.get(name)), 0))


def layers_with_experts(tree: Mapping[str, Any]) -> tuple[int, ...]:
    """Returns the numbers of the layers with experts in a model that has some, by its config.json.

    It names them (Llama 4), or layers without: one by one, the first ones (DeepSeek), or all but every n-th
    (Qwen).
    """
    tree = tree.get("text_config") or tree
    layers = range(int(tree["num_hidden_layers"]))
    if kinds := tree.get("mlp_layer_types"):
        return tuple(layer for layer in layers if kinds[layer] == "sparse")
    if (sparse := tree.get("moe_layers")) is not None:
        return tuple(sparse)
    first = _number(tree, "first_k_dense_replace")
    step = _number(tree, "decoder_sparse_step", "interleave_moe_layer_step") or 1
    named = set(tree.get("mlp_only_layers") or ())
    return tuple(
        layer for layer in layers if layer >= first and layer not in named and (layer + 1) % step == 0
    )


def num_experts_of(tree: Mapping[str, Any]) -> int:
    """Returns the number of experts per layer by a model's config.json; 0 if there are none."""
    return _number(tree.get("text_config") or tree, *_NUM_EXPERTS)


def choice_bytes(tree: Mapping[str, Any]) -> int:
    """Returns the bytes of a token's choices of experts in all layers (`ExpertChoices`); 0 without any."""
    tree = tree.get("text_config") or tree
    num_experts = num_experts_of(tree)
    if not num_experts:
        return 0
    item_bytes = 1 if num_experts <= 256 else 2
    return len(layers_with_experts(tree)) * _number(tree, "num_experts_per_tok") * item_bytes
