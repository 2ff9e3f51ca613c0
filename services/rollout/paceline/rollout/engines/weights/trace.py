"""Traces an engine's own loading on stand-ins, to find where each part of a learner's tensor lands in a live
model.

stand-ins of the learner's tensors -> checkpoint names -> the model's `load_weights` -> every copy, as boxes
weights in kernel format -> which parameters a kernel has changed or derived something from

A stand-in has a shape but no memory. The strides of a view say which box of which tensor it is. So whatever a
loader slices, splits, transposes or renames, its copies show where each box goes. A parameter cannot be
pushed in place if it is not a copy of boxes (a computed weight), or if its content changes later (repacked
weights, matrices that a kernel derives from them). A model with such a parameter takes the general path.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from paceline.rollout.engines.weights.checkpoint import checkpoint_tensors
from paceline.weights.geometry.boxes import Box
from paceline.weights.geometry.layout import TensorSlice
from paceline.weights.geometry.parameters import TRANSPOSED

Places = dict[str, tuple[int, torch.Size, torch.dtype]]
"""The storage of every parameter, by name."""

_MADE = "it is made from loaded weights"
_COPY = torch.ops.aten.copy_.default
_ZERO = torch.ops.aten.zero_.default
_VIEW_OF_COPY = torch.ops.aten._unsafe_view.default
_ALIASES = (torch.ops.aten.clone.default, torch.ops.aten._to_copy.default)
_OVERWRITES = (
    _COPY,
    torch.ops.aten.fill_.Scalar,
    torch.ops.aten.fill_.Tensor,
    _ZERO,
)
_SHAPES_ONLY = ("aten.empty_like", "aten.new_empty", "aten.zeros_like", "aten.new_zeros", "aten.ones_like")


@dataclass(kw_only=True, slots=True)
class LoadTrace:
    """The effect of loading on a model's parameters.

    Attributes:
        slices: the copies, as boxes; adjacent boxes are merged.
        reasons: by name, why a parameter cannot be pushed in place; empty if all can.
    """

    slices: tuple[TensorSlice, ...] = ()
    reasons: dict[str, str] = field(default_factory=dict)
    places: Places = field(default_factory=dict)

    @property
    def made(self) -> set[str]:
        """Returns the parameters that no checkpoint has: the engine computes them after each load."""
        return {name for name, reason in self.reasons.items() if reason == _MADE}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Copy:
    """One box of a learner's tensor, and the box of a parameter that it is copied to.

    `is_transposed`: the last two dimensions of the tensor and the parameter are swapped.
    """

    name: str
    box: Box
    target: Box
    number: int
    is_transposed: bool

    @property
    def place(self) -> Box:
        """Returns the target box, with its dimensions in the tensor's order."""
        return _swapped(self.target) if self.is_transposed else self.target


def trace_load(model: Any, tensors: Mapping[str, tuple[int, ...]], *, model_type: str) -> LoadTrace:
    """Makes the model load stand-ins, and records the copies that it makes.

    Constants that a loader writes (padding) are written; nothing else changes.

    Args:
        model: the engine's model, before its weights are converted to kernel format.
        tensors: shapes of the learner's tensors by name.
        model_type: as in the model's config.json.
    """
    dtype = next(model.parameters()).dtype
    stand_ins = {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in tensors.items()}
    recorder = _Recorder()
    try:
        with torch.no_grad(), recorder:
            model.load_weights(
                checkpoint_tensors(stand_ins.items(), model_type=model_type, keeps_stacks=True)
            )
            _write_unread(model)
    except Exception as error:  # noqa: BLE001  a model's own loader may fail in any way on a stand-in
        reason = f"its loading cannot be traced ({type(error).__name__}: {error})"
        return LoadTrace(reasons=dict.fromkeys(_parameters(model), reason))
    # Looked up only now, because some parameters are created during loading.
    return _resolve(recorder, _parameters(model), stand_ins)


def _write_unread(model: nn.Module) -> None:
    """Writes zeros into parameters that get no tensor and are never read.

    Gemma 4's last layers use the keys and values of earlier layers, but in engines they may still have
    projections and norms for keys.
    """
    for module in model.modules():
        attention: Any = module
        if getattr(module, "is_kv_shared_layer", False) and hasattr(module, "k_norm"):
            attention.k_norm.weight.data.zero_()
            attention.qkv_proj.weight.data[attention.q_size :].zero_()


def _resolve(recorder: _Recorder, params: Mapping[str, Tensor], stand_ins: Mapping[str, Tensor]) -> LoadTrace:
    """Interprets the recorded storages as boxes of parameters and of the learner's tensors."""
    names = {_storage(param): name for name, param in params.items()}
    sources = {_storage(tensor): name for name, tensor in stand_ins.items()}
    reasons = {
        names[key]: f"{func} computes it from loaded values"
        for key, (func, _) in recorder.computed.items()
        if key in names
    }
    copies: dict[str, list[_Copy]] = {name: [] for name in params}
    constants: dict[str, list[Box]] = {name: [] for name in params}
    for number, (target, source) in enumerate(recorder.copies):
        if (name := names.get(_storage(target))) is None:
            continue
        part = "" if _storage(source) in recorder.computed else sources.get(_storage(source), "")
        copy = _copied(part, source, stand_ins[part], target, params[name], number) if part else None
        if copy is None:
            reasons.setdefault(name, f"values of {part or 'several tensors'} are rearranged for it")
        elif copy.box.volume:
            copies[name].append(copy)
    for target, before in recorder.constants:
        if (name := names.get(_storage(target))) and (to := _box(target, params[name])) and to.volume:
            constants[name].append(to)
            if any(copy.number < before and copy.target.intersect(to) for copy in copies[name]):
                reasons.setdefault(name, "its loading overwrites what it has loaded")
    slices: list[TensorSlice] = []
    for name, param in params.items():
        if not _fill(param, [copy.target for copy in copies[name]], constants[name]):
            reasons.setdefault(name, "its loading leaves a part of it unchanged, or writes a part twice")
        slices += _merged(name, copies[name], stand_ins)
    return LoadTrace(slices=tuple(slices), reasons=reasons)


def _copied(
    part: str, source: Tensor, stand_in: Tensor, target: Tensor, param: Tensor, number: int
) -> _Copy | None:
    """Returns the copy as boxes, possibly with the last dimensions swapped; None if that is impossible."""
    box, to, is_transposed = _box(source, stand_in), _box(target, param), False
    if box is None and source.ndim > 1 and target.stride()[-2:] == param.stride()[-2:]:
        box, is_transposed = _box(source.mT, stand_in), True
    if box is None or to is None or source.shape != target.shape:
        return None
    copy = _Copy(name=part, box=box, target=to, number=number, is_transposed=is_transposed)
    return copy if copy.place.shape == box.shape else None


@contextlib.contextmanager
def watch_processing(model: nn.Module, trace: LoadTrace) -> Iterator[None]:
    """Adds to the trace how the engine changes the parameters while it converts weights to kernel format."""
    before = _parameters(model)
    spy = _Spy(before)
    with spy:
        yield
    after = _parameters(model)
    for name, param in before.items():
        if name in spy.touched:
            trace.reasons.setdefault(name, f"a kernel derives its own weights from it ({spy.touched[name]})")
        elif name not in after or not _same_place(param, after[name]):
            trace.reasons.setdefault(name, "it is replaced after it was loaded")
    for name in after.keys() - before.keys():
        trace.reasons.setdefault(name, _MADE)


def parameter_places(model: nn.Module) -> Places:
    """Returns the current storage of every parameter."""
    return {name: (param.data_ptr(), param.shape, param.dtype) for name, param in model.named_parameters()}


_TRACES: WeakKeyDictionary[nn.Module, LoadTrace] = WeakKeyDictionary()


def recall(model: nn.Module) -> LoadTrace | None:
    """Returns the trace of a model's loading; None if it was not traced."""
    return _TRACES.get(model)


@contextlib.contextmanager
def traced(model: nn.Module, tensors: Mapping[str, tuple[int, ...]], *, model_type: str) -> Iterator[None]:
    """Traces a model's loading; the block converts its weights to kernel format."""
    trace = trace_load(model, tensors, model_type=model_type)
    with watch_processing(model, trace):
        yield
    trace.places = parameter_places(model)
    _TRACES[model] = trace


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call,unused-ignore]
    """Records the copies from stand-ins into other tensors, instead of making them.

    Attributes:
        copies: (target, source) of every copy from a stand-in.
        constants: tensors that were written with other values, each with the number of copies before it.
        computed: storages with values computed from stand-ins, with the operation and the tensor; among them
            are stand-ins that the loader has changed.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call,unused-ignore]
        self.copies: list[tuple[Tensor, Tensor]] = []
        self.constants: list[tuple[Tensor, int]] = []
        self.computed: dict[int, tuple[str, Tensor]] = {}
        self._loaded: set[int] = set()
        self._zeros: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is _COPY and _storage(args[1]) in self._zeros:
            func, args = _ZERO, args[:1]
        if func is _COPY and args[1].is_meta and not args[0].is_meta:
            self.copies.append((args[0].detach(), args[1].detach()))
            self._loaded.add(_storage(args[0]))
            return args[0]
        if func in _ALIASES and args[0].is_meta and _holds(kwargs.get("dtype"), args[0].dtype):
            return args[0].view_as(args[0])
        if func is _VIEW_OF_COPY and args[0].is_meta and not args[0].is_contiguous():
            return self._view_of_copy(args[0], args[1])
        if func is _ZERO and args[0].is_meta and _is_whole(args[0]):
            # If two ranks sum their results, the second adds no bias.
            self._zeros.add(_storage(args[0]))
            return args[0]
        written = list(written_by(func, args, kwargs))
        if written and (written[0].is_meta or self._reads_loaded(func, args, kwargs)):
            self._note_computed(func, written)
            return args[0]
        self.constants += [(tensor.detach(), len(self.copies)) for tensor in written]
        result = func(*args, **kwargs)
        if not written and _computes(func) and self._reads_loaded(func, args, kwargs):
            self._note_computed(func, [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)])
        return result

    @staticmethod
    def _view_of_copy(alias: Tensor, shape: Any) -> Tensor:
        """Returns a view of a copy, which is an alias here; another tensor if the alias has no such view."""
        with contextlib.suppress(RuntimeError):
            return alias.view(shape)
        return alias.contiguous().view(shape)

    def _reads_loaded(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        values = tree_leaves((args[1:] if func in _OVERWRITES else args, kwargs))
        tensors = [value for value in values if isinstance(value, Tensor)]
        return any(tensor.is_meta or _storage(tensor) in self._loaded for tensor in tensors)

    def _note_computed(self, func: Any, tensors: list[Tensor]) -> None:
        # Tensors are kept, because a storage's address is unique only while the storage exists.
        self.computed |= {_storage(tensor): (str(func), tensor) for tensor in tensors}
        self._loaded |= self.computed.keys()


class _Spy(TorchDispatchMode):  # type: ignore[no-untyped-call,unused-ignore]
    """Notes which parameters are changed or used in a computation."""

    def __init__(self, params: Mapping[str, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call,unused-ignore]
        self._names = {_storage(param): name for name, param in params.items()}
        self.touched: dict[str, str] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if _computes(func) and not (func is _COPY and _same_place(args[0], args[1])):
            for value in tree_leaves((args, kwargs)):
                if isinstance(value, Tensor) and (name := self._names.get(_storage(value))):
                    self.touched.setdefault(name, str(func))
        return func(*args, **kwargs)


def _holds(dtype: torch.dtype | None, own: torch.dtype) -> bool:
    """Returns whether a cast to a type keeps all values; None is no cast."""
    return dtype is None or torch.promote_types(dtype, own) == dtype


def _is_whole(tensor: Tensor) -> bool:
    return tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()


def _swapped(box: Box) -> Box:
    """Returns the box with its last two dimensions swapped."""
    start, stop = box.start, box.stop
    return Box((*start[:-2], *start[:-3:-1]), (*stop[:-2], *stop[:-3:-1]))


def _computes(func: Any) -> bool:
    """Returns whether an operation changes a tensor or computes from its values, unlike a view."""
    if str(func).startswith(_SHAPES_ONLY):
        return False
    if any(part.alias_info is not None and part.alias_info.is_write for part in func._schema.arguments):
        return True
    return any("Tensor" in str(part.type) and part.alias_info is None for part in func._schema.returns)


def written_by(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """Yields the tensors that an operator writes to."""
    for index, part in enumerate(func._schema.arguments):
        if part.alias_info is not None and part.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(part.name)
            yield from (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))


def _parameters(model: nn.Module) -> dict[str, Tensor]:
    """Returns each parameter once, by its first name; the references keep the storages alive."""
    return {name: param.detach() for name, param in model.named_parameters()}


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _same_place(a: Tensor, b: Tensor) -> bool:
    return (
        _storage(a) == _storage(b)
        and a.storage_offset() == b.storage_offset()
        and a.shape == b.shape
        and a.stride() == b.stride()
        and a.dtype == b.dtype
    )


def _box(view: Tensor, base: Tensor) -> Box | None:
    """Returns which box of a contiguous tensor a view is; None if it is no box or has moved dimensions."""
    if not base.is_contiguous() or view.storage_offset() < base.storage_offset():
        return None
    strides, rest = base.stride(), view.storage_offset() - base.storage_offset()
    if not view.numel():
        return Box((0,) * base.ndim, (0,) * base.ndim)
    start = []
    for stride in strides:
        start.append(rest // stride)
        rest %= stride
    extents, last = [1] * base.ndim, -1
    for size, stride in zip(view.shape, view.stride(), strict=True):
        if size == 1:
            continue
        dim = next((d for d in range(base.ndim) if strides[d] == stride and base.shape[d] > 1), -1)
        if dim <= last:
            return None
        extents[dim], last = size, dim
    stop = [first + extent for first, extent in zip(start, extents, strict=True)]
    if any(end > size for end, size in zip(stop, base.shape, strict=True)):
        return None
    return Box(tuple(start), tuple(stop))


def _fill(param: Tensor, copied: list[Box], constants: Iterable[Box]) -> bool:
    """Returns whether the boxes fill the parameter, and no two copies overlap."""
    boxes = _merged_boxes(copied)
    rest = [Box.full(tuple(param.shape))]
    for box in boxes:
        rest = [piece for part in rest for piece in part.subtract(box)]
    if sum(box.volume for box in boxes) != param.numel() - sum(part.volume for part in rest):
        return False
    for box in _merged_boxes(list(constants)):
        rest = [piece for part in rest for piece in part.subtract(box)]
    return not rest


def _merged(param: str, copies: list[_Copy], stand_ins: Mapping[str, Tensor]) -> list[TensorSlice]:
    """Merges the copies into one parameter to few slices."""

    def shift(copy: _Copy) -> tuple[str, str, tuple[int, ...]]:
        by = tuple(to - start for to, start in zip(copy.place.start, copy.box.start, strict=True))
        return copy.name, param + TRANSPOSED if copy.is_transposed else param, by

    slices = []
    for (name, place, by), group in groupby(sorted(copies, key=shift), key=shift):
        shape = tuple(stand_ins[name].shape)
        for box in _merged_boxes([part.box for part in group]):
            offset = tuple(start + step for start, step in zip(box.start, by, strict=True))
            slices.append(TensorSlice(name=name, global_shape=shape, box=box, param=place, offset=offset))
    return slices


def _merged_boxes(boxes: list[Box]) -> list[Box]:
    """Merges boxes that are adjacent along one dimension, for each dimension in turn."""
    for dim in reversed(range(len(boxes[0].start) if boxes else 0)):

        def others(box: Box, dim: int = dim) -> tuple[Any, ...]:
            return box.start[:dim], box.start[dim + 1 :], box.stop[:dim], box.stop[dim + 1 :]

        merged: list[Box] = []
        for box in sorted(boxes, key=lambda box: (others(box), box.start[dim])):
            last = merged[-1] if merged else None
            if last is not None and others(last) == others(box) and last.stop[dim] == box.start[dim]:
                stop = (*last.stop[:dim], box.stop[dim], *last.stop[dim + 1 :])
                merged[-1] = Box(last.start, stop)
            else:
                merged.append(box)
        boxes = merged
    return boxes
