"""Loads sharded networks: each rank reads only its own rows of each tensor.

A network is created without storage. Each layer gets storage and is sharded at once, so a rank holds at most
one full layer. Then every shard is filled from the safetensors files, or from the seed.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import AutoConfig

from paceline.config.model import LoraConfig
from paceline.core.errors import ModelError
from paceline.core.policy import TrainedVision
from paceline.learner.distributed.ranks import Ranks
from paceline.learner.distributed.shards import own_part
from paceline.learner.model import architectures
from paceline.learner.model.decoder import attention
from paceline.learner.model.decoder.compiling import take_numbers_as_known
from paceline.learner.model.decoder.divided.expert_parallel import divide_experts, keep_routes, spread_experts
from paceline.learner.model.decoder.divided.tensor_parallel import divide_matrices, spread_matrices
from paceline.learner.model.decoder.experts import (
    note_choices,
    use_correction_parameters,
    use_float32_routers,
)
from paceline.learner.model.decoder.layers import DEFAULT_OPTIONS, LayerOptions
from paceline.learner.model.decoder.llama4 import use_packed_llama4
from paceline.learner.model.decoder.recurrence import use_packed_recurrence
from paceline.learner.model.image_states import is_trained, train_tower, vision_tower
from paceline.learner.model.lora import B, add_adapters, is_adapter, require_compilable_adapters
from paceline.learner.model.networks import (
    PolicyNetwork,
    ValueNetwork,
    body_of,
    decoder_layers,
    hidden_size,
)
from paceline.learner.model.tensor_files import ModelFiles, ReadRows
from paceline.models.facts import family_of
from paceline.storage.weight_files import require_plain_weights, weight_files
from paceline.weights import corrections

VALUE_HEAD_STD = 0.01
BLOCK = 1 << 24
"""How many numbers of a tensor are drawn from one generator, or read, at a time"""
_SAMPLE = 1 << 14
"""How many numbers a digest takes at each place of a large tensor"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Precision:
    """Data types: `compute` in the forward pass, `store` for parameters, `reduce` for sums over ranks."""

    compute: torch.dtype
    store: torch.dtype = torch.float32
    reduce: torch.dtype = torch.float32


def read_config(folder: str | Path) -> Any:
    """Returns the transformers configuration of a model folder, with every dropout at 0.

    Raises:
        ModelError: config.json is missing or unreadable, or the quantisation is not supported.
    """
    path = Path(folder)
    if not (path / "config.json").is_file():
        raise ModelError(
            f"model folder {path} has no config.json; set model.path to a folder in the Hugging Face layout"
        )
    require_plain_weights(path, dequantises=True)
    try:
        config = plain_config(path)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"{path}/config.json does not load: {error}") from error
    return architectures.without_dropout(config)


def plain_config(folder: str | Path) -> Any:
    """Returns the transformers configuration of a folder, as for the unquantised model."""
    config = AutoConfig.from_pretrained(str(folder), local_files_only=True)
    for part in (config, config.get_text_config()):
        vars(part).pop("quantization_config", None)
    return config


def load_policy(
    folder: str | Path,
    ranks: Ranks,
    precision: Precision,
    *,
    options: LayerOptions = DEFAULT_OPTIONS,
    random_seed: int | None = None,
    lora: LoraConfig | None = None,
    adapter_seed: int = 0,
    vision: TrainedVision = "none",
) -> PolicyNetwork:
    """Loads a policy, sharded over the ranks.

    Args:
        precision: precision of computing, storing and reducing.
        random_seed: seed to draw the weights from, instead of reading them.
        lora: adapters to train; the model itself is then frozen.
        vision: the part of the vision tower that trains.

    Raises:
        ModelError: a tensor is missing or has another shape than the model's.
        ConfigError: the model does not have the adapters' targets.
    """
    network = unfilled_policy(folder, ranks, precision, options=options, lora=lora, vision=vision)
    _fill(network, _CompleteSource(_source(folder, random_seed, network, network.lm.config), adapter_seed))
    return network


def unfilled_policy(
    folder: str | Path,
    ranks: Ranks,
    precision: Precision,
    *,
    options: LayerOptions = DEFAULT_OPTIONS,
    lora: LoraConfig | None = None,
    vision: TrainedVision = "none",
) -> PolicyNetwork:
    """Returns a sharded policy with uninitialised parameters; arguments as for `load_policy`."""
    lm = empty_lm(read_config(folder), vision)
    if lora is not None:
        add_adapters(lm, decoder_layers(body_of(lm)), lora)
    network = PolicyNetwork(lm)
    _materialise(network, body_of(lm), lm, ranks, precision, options)
    return network


def stored_tensors(
    folder: str | Path, random_seed: int | None = None, *, frozen_beside: TrainedVision | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yields the full tensors that `load_policy` reads or draws.

    With `frozen_beside`, only those that are frozen if this part of the vision tower trains.
    """
    lm = empty_lm(read_config(folder), frozen_beside or "none")
    source = _source(folder, random_seed, lm, lm.config)
    for name, parameter in lm.named_parameters():
        if frozen_beside is None or not parameter.requires_grad:
            yield name, source.rows(name, parameter.shape)(0, parameter.shape[0])


def digest_of_frozen(
    folder: str | Path, parameters: Iterable[tuple[str, Tensor]], random_seed: int | None = None
) -> str:
    """Returns a digest of a model's frozen parameters, whatever files hold them; "" without any.

    It samples a large tensor in 16 places: another model would differ everywhere, and reading it all would
    take as long as loading.

    Args:
        random_seed: seed of the weights, if they are drawn.
    """
    shapes = {name: parameter.shape for name, parameter in parameters}
    if not shapes:
        return ""
    if random_seed is not None:
        return f"drawn from seed {random_seed}"
    files, digest = ModelFiles(Path(folder)), hashlib.blake2b(digest_size=16)
    for name, shape in sorted(shapes.items()):
        read, num_rows = files.rows(name, shape), shape[0]
        count = max(1, _SAMPLE // max(1, math.prod(shape[1:])))
        places = {0} if num_rows <= 16 * count else {(num_rows - count) * i // 15 for i in range(16)}
        for start in sorted(places):
            rows = read(start, num_rows if len(places) == 1 else start + count).contiguous()
            digest.update(f"{name} {tuple(shape)} {rows.dtype} {start}\n".encode())
            digest.update(rows.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def frozen(parameters: Iterable[tuple[str, nn.Parameter]]) -> Iterator[tuple[str, nn.Parameter]]:
    """Yields the parameters that checkpoints omit: all frozen ones except corrections."""
    for name, parameter in parameters:
        if not (parameter.requires_grad or name.endswith(corrections.PARTS)):
            yield name, parameter


def load_critic(
    folder: str | Path,
    ranks: Ranks,
    precision: Precision,
    *,
    seed: int,
    options: LayerOptions = DEFAULT_OPTIONS,
    random_weights: bool = False,
    has_bias: bool = True,
) -> ValueNetwork:
    """Loads a sharded critic; draws its value head from the seed if the folder has none.

    Arguments as for `load_policy`. A reward model has no bias.
    """
    lm = empty_lm(read_config(folder))
    with torch.device("meta"):
        network = ValueNetwork(lm, hidden_size(lm.config), has_bias=has_bias)
    _materialise(network, network.body, lm, ranks, precision, options)
    source = _source(folder, seed if random_weights else None, network, lm.config)
    _fill(network, _CompleteSource(source, seed))
    return network


def hugging_face_names(network: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yields parameters by their names in the Hugging Face layout; tied ones once."""
    for name, parameter in network.named_parameters():
        yield name.removeprefix("lm."), parameter


def as_fsdp(network: nn.Module) -> FSDPModule:
    """Returns the network with the type that `fully_shard` gave it."""
    if not isinstance(network, FSDPModule):
        raise TypeError(f"{type(network).__name__} is not sharded")
    return network


def forget_forward_passes(network: nn.Module) -> None:
    """Frees gathered weights, and FSDP's records of forward passes without a backward pass.

    After a forward pass FSDP keeps the root's weights gathered, and with `keep_gathered` the layers', so the
    next pass would use weights from before the update. Its records for backward passes grow with each pass.
    """
    for module in network.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    state: Any = as_fsdp(network)._get_fsdp_state()
    state._comm_ctx.post_forward_order.clear()
    for part in state._state_ctx.all_states:
        groups = getattr(part, "_fsdp_param_groups", None)
        for group in (part._fsdp_param_group,) if groups is None else groups:  # torch before 2.13 has one
            if group is not None:
                group._post_forward_indices.clear()


def empty_lm(config: Any, vision: TrainedVision = "none") -> Any:
    """Returns the model on the meta device: shapes without storage. Of a vision tower only `vision` trains.

    Raises:
        ModelError: transformers has no causal language model of this kind whose attention can be replaced, or
            it has no vision tower to train.
    """
    attention.register()
    implementation: Any = attention.PACKED_ATTENTION
    if family_of(config.model_type).takes_images:
        # The tower attends within an image in both directions.
        implementation = {"text_config": implementation, "vision_config": "sdpa"}
    try:
        with torch.device("meta"):
            lm = architectures.model_class(config).from_config(
                config, attn_implementation=implementation, dtype=torch.float32
            )
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(
            f"model_type {config.model_type!r} is no causal language model with exchangeable attention "
            f"({type(error).__name__}: {error}); use one of the architectures of docs/models.md"
        ) from error
    use_packed_llama4(lm)
    use_float32_routers(lm)
    note_choices(lm)
    use_correction_parameters(lm)
    use_packed_recurrence(lm)
    train_tower(body_of(lm), vision)
    lm.train()
    return lm


def _materialise(
    network: PolicyNetwork | ValueNetwork,
    body: nn.Module,
    lm: Any,
    ranks: Ranks,
    precision: Precision,
    options: LayerOptions,
) -> None:
    network.token_multiple = options.token_multiple
    if ranks.context is not None:
        architectures.require_shared_tokens(lm.config, ranks.context.size)
        network.context = ranks.context
    if options.compiled:
        architectures.require_compilable(lm.config)
        require_compilable_adapters(lm)
    policy = MixedPrecisionPolicy(param_dtype=precision.compute, reduce_dtype=precision.reduce)
    tower = vision_tower(body)
    trained = tower if tower is not None and is_trained(tower) else None
    options.apply(lm, decoder_layers(body), ranks.device, trained)
    for layer in decoder_layers(body):
        divided = [] if ranks.experts is None else divide_experts(layer, ranks.experts.size(-1))
        parts = [] if ranks.tensors is None else divide_matrices(layer, ranks.tensors.size(-1))
        give_storage(layer, lm, ranks.device, precision.store)
        for experts in divided:
            assert ranks.experts is not None
            spread_experts(experts, ranks.experts["expert"])
            _shard_divided([experts], ranks.experts, policy, options)
        if divided:
            keep_routes(layer)
        if ranks.tensors is not None and ranks.context is not None:
            matrices = spread_matrices(parts, ranks.tensors["tensor"], ranks.context)
            _shard_divided(matrices, ranks.tensors, policy, options)
        fully_shard(layer, mesh=ranks.fsdp, mp_policy=policy, reshard_after_forward=not options.keep_gathered)
        if options.compiled:
            take_numbers_as_known(layer)
    give_storage(network, lm, ranks.device, precision.store)
    if isinstance(network, PolicyNetwork):
        lm.tie_weights()  # tied parameters got storage one by one
    # Inputs are not cast, because FSDP would copy all rows of the micro-batch.
    fully_shard(network, mesh=ranks.fsdp, mp_policy=replace(policy, cast_forward_inputs=False))


def _shard_divided(
    modules: list[Any], mesh: DeviceMesh, policy: MixedPrecisionPolicy, options: LayerOptions
) -> None:
    """Shards this rank's part of what the last dimension of a mesh divides over the others."""
    fully_shard(
        modules,
        mesh=mesh[(mesh.mesh_dim_names or ())[:-1]],
        # Weights of choices may be float32, and are multiplied in it.
        mp_policy=replace(policy, cast_forward_inputs=False),
        reshard_after_forward=not options.keep_gathered,
    )
    fsdp = as_fsdp(modules[0])  # they are one unit
    # FSDP would divide by the ranks that it reduces over, but each had the tokens of its group already.
    fsdp.set_gradient_divide_factor(float(mesh.size()))
    if mesh.size(-2) > 1:  # alone, FSDP would divide twice
        fsdp.set_force_sum_reduction_for_comms(True)  # gloo has no sum with a factor


def give_storage(module: nn.Module, lm: Any, device: torch.device, dtype: torch.dtype) -> None:
    """Allocates the parts of a model on the meta device; leaves parameters uninitialised."""
    for part in module.modules():
        own = [*part.parameters(recurse=False), *part.buffers(recurse=False)]
        if not any(tensor.is_meta for tensor in own):
            continue
        part.to_empty(device=device, recurse=False)
        for name, parameter in part.named_parameters(recurse=False):
            if not is_adapter(f".{name}"):  # adapters keep float32 masters
                parameter.data = parameter.data.to(dtype)
        if any(True for _ in part.buffers(recurse=False)):
            lm._init_weights(part)  # rotary frequencies are computed, never read


class _Seed:
    """Weights drawn from (seed, tensor name), so they do not depend on the number of ranks."""

    def __init__(self, seed: int, std: float) -> None:
        self.seed, self.std = seed, std

    def __contains__(self, name: str) -> bool:
        return not name.startswith("value_head.")

    def rows(self, name: str, shape: torch.Size) -> ReadRows:
        if name.endswith(corrections.PARTS):
            return lambda start, stop: torch.zeros(stop - start, *shape[1:])
        if len(shape) > 1:
            return partial(_draw_rows, shape, self.std, self.seed, name)
        fill = 0.0 if name.endswith("bias") else 1.0
        return lambda start, stop: torch.full((stop - start, *shape[1:]), fill)


class _CompleteSource:
    """Adds what a source lacks, drawn from the seed: adapters, and a value head.

    An adapter's B begins as zeros, its A like torch's linear layers. A value head is the source's own, or a
    reward model's `score`, before it is drawn.
    """

    def __init__(self, inner: ModelFiles | _Seed, seed: int) -> None:
        self.inner, self.seed = inner, seed

    def rows(self, name: str, shape: torch.Size) -> ReadRows:
        is_head = name.startswith("value_head.") and name not in self.inner
        if not is_head and not is_adapter(name):
            return self.inner.rows(name, shape)
        score = name.replace("value_head.", "score.")
        if is_head and isinstance(self.inner, ModelFiles) and score in self.inner:
            return self.inner.rows(score, shape)
        if name.endswith(("bias", B)):
            return lambda start, stop: torch.zeros(stop - start, *shape[1:])
        std = VALUE_HEAD_STD if is_head else 1 / math.sqrt(3 * shape[1])
        return partial(_draw_rows, shape, std, self.seed, name)


def draw_normal(shape: torch.Size, std: float, seed: int, name: str) -> Tensor:
    """Draws N(0, std) in float32 on the CPU; depends only on (seed, name)."""
    word = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(word, "big") >> 1)
    return torch.randn(shape, generator=generator, dtype=torch.float32).mul_(std)


def _draw_rows(shape: torch.Size, std: float, seed: int, name: str, start: int, stop: int) -> Tensor:
    """Draws rows [start, stop) of N(0, std), independently of how rows are split into calls.

    Each block of a tensor has its own generator.
    """
    parts = []
    for index, (begin, end) in enumerate(_blocks(shape)):
        first, last = max(start, begin), min(stop, end)
        if first < last:
            block = torch.Size((end - begin, *shape[1:]))
            drawn = draw_normal(block, std, seed, f"{name}/{index}" if index else name)
            parts.append(drawn[first - begin : last - begin])
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _blocks(shape: torch.Size) -> Iterator[tuple[int, int]]:
    """Yields rows [begin, end) of the blocks by which a tensor is filled."""
    num_rows = max(1, BLOCK // max(1, math.prod(shape[1:])))
    for begin in range(0, shape[0], num_rows):
        yield begin, min(begin + num_rows, shape[0])


def check_stored(folder: str | Path, *, needs_head: bool) -> None:
    """Checks the headers of a folder's weight files, if any: they must hold exactly the model's tensors.

    Raises:
        ModelError: a tensor is missing, has another shape, or does not belong to the model.
    """
    if not weight_files(Path(folder)):
        return
    lm = empty_lm(read_config(folder))
    with torch.device("meta"):
        network = lm if needs_head else ValueNetwork(lm, hidden_size(lm.config))
    _source(folder, None, network, lm.config)


def _source(
    folder: str | Path, random_seed: int | None, network: nn.Module, config: Any
) -> ModelFiles | _Seed:
    """Returns the source of a network's tensors.

    Raises:
        ModelError: the folder lacks tensors of the network, or has others.
    """
    if random_seed is not None:
        return _Seed(random_seed, float(getattr(config, "initializer_range", 0.02)))
    files = ModelFiles(Path(folder))
    for name, parameter in hugging_face_names(network):
        if not (is_adapter(name) or name.startswith("value_head.")):
            files.rows(name, parameter.shape)
    files.require_all_read(config, has_head=not isinstance(network, ValueNetwork))
    return files


@torch.no_grad()
def _fill(network: nn.Module, source: _CompleteSource) -> None:
    """Fills tensors, a block per thread, because drawing or converting takes longer than copying."""
    blocks = []
    for name, parameter in hugging_face_names(network):
        local, box = own_part(parameter)
        if not box.volume:
            continue
        read, (start, stop) = source.rows(name, parameter.shape), (box.start[0], box.stop[0])
        for begin, end in _blocks(parameter.shape):
            first, last = max(start, begin), min(stop, end)
            if first < last:
                rows = local[first - start : last - start]
                blocks.append((rows, partial(_read_part, read, first, last, box.slices[1:])))
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # blocks run in parallel, so none needs its own threads
    try:
        with ThreadPoolExecutor(num_threads, thread_name_prefix="weights") as threads:
            fills = [threads.submit(_fill_block, rows, read) for rows, read in blocks]
            try:
                for fill in fills:
                    fill.result()
            finally:
                threads.shutdown(wait=False, cancel_futures=True)  # after an error, read no more
    finally:
        torch.set_num_threads(num_threads)


def _read_part(read: ReadRows, first: int, last: int, within: tuple[slice, ...]) -> Tensor:
    return read(first, last)[(slice(None), *within)]


@torch.no_grad()
def _fill_block(rows: Tensor, read: Callable[[], Tensor]) -> None:
    rows.copy_(read().to(rows.device))  # converted on the device: files have half precision, masters float32
