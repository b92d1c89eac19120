"""Inputs of a step whose values the host knows, so that transformers' `_sample` does not read them from the device.

transformers reads two inputs on the host at each step, to decide what the step does:

    4.57    cache_position[-1] >= input_ids.shape[1]         with any cache
            padding_mask.all()                               with sdpa and a dynamic cache
    5.19    padding_mask.sum() == padding_mask.numel()       the same, if the batch is padded

The answers are known before the loop: positions grow by one a step, and a mask grows by ones. So both inputs stay
device tensors with the same values, and also carry what the host knows. The device still computes everything; the host
only answers reads. If a later transformers uses an operation that is not handled below, its result carries nothing.
Reading that result waits, and is correct.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import MethodWrapperType
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_leaves

from vllm_async_spec.generation.method_patching import replaced

_MASKS = ("attention_mask", "decoder_attention_mask")


@contextlib.contextmanager
def known_inputs(
    model: Any, input_ids: torch.Tensor, generation_config: Any, kwargs: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """Yield the arguments of `_sample`, with the inputs that a step reads known to the host. Reads the device once.

    4-D masks, and masks with values other than ones and zeros, stay unchanged. A compiled forward gets plain tensors,
    because PyTorch would recompile it for each known value. It reads no mask, so its masks stay unchanged too. Its
    positions are known only until the inputs of a step are prepared. Flex attention compiles its masks during that
    preparation, so there everything stays unchanged. Prompts are int64 (batch, length).
    """
    if model.config.get_text_config(decoder=True)._attn_implementation == "flex_attention":
        yield kwargs
        return
    known = dict(kwargs)
    compiled = _compiles(model, generation_config, kwargs)
    if not compiled:
        for name in _MASKS:
            if known.get(name) is not None:
                known[name] = _known_mask(known[name])
    has_positions = hasattr(model, "_get_initial_cache_position")
    if has_positions:  # `_sample` of transformers 4 starts with this call
        known = model._get_initial_cache_position(input_ids.shape[1], input_ids.device, known)
        positions = known["cache_position"]
        known["cache_position"] = carry(positions, Value(positions.cpu()))
    with inputs_after(model, plain) if compiled and has_positions else contextlib.nullcontext():
        yield known


def inputs_after(model: Any, change: Callable[[Any], Any]) -> AbstractContextManager[None]:
    """Apply `change` to each input that `model.prepare_inputs_for_generation` returns, in the block.

    transformers may read inputs up to this method, and has no other hook between it and the forward. Several threads
    may generate with one model at a time, if each passes the same `change`.
    """
    return replaced(model, "prepare_inputs_for_generation", functools.partial(_changed, change))


def _changed(change: Callable[[Any], Any], prepare: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    @functools.wraps(prepare)
    def prepared(*args: Any, **kwargs: Any) -> dict[str, Any]:
        return {name: change(each) for name, each in prepare(*args, **kwargs).items()}

    return prepared


class Known(Protocol):
    """What the host knows of a tensor."""

    def after(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Known | None:
        """What the host then knows of the result of `func` on the tensor and the other arguments; None if nothing."""
        ...


@dataclass(frozen=True, slots=True)
class Value:
    """The host knows the whole tensor."""

    host: torch.Tensor

    def after(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Known | None:
        """See `Known`."""
        if func in _COMPUTED and not kwargs and not _has_tensor(args[1:]):
            return Value(func(self.host, *args[1:]))
        return None


@dataclass(frozen=True, slots=True)
class Padding:
    """The host knows that the tensor is all ones; or, if `padded`, ones and at least one zero."""

    padded: bool

    def after(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Known | None:
        """See `Known`."""
        if func in _MOVED or (func in _EQUAL and _compares_with(1, args)):
            return self
        if func is torch.Tensor.new_ones:
            return Padding(False)
        if func is torch.cat:
            parts = [known_of(part) for part in args[0]]
            found = [each.padded for each in parts if isinstance(each, Padding)]
            return Padding(any(found)) if len(found) == len(parts) else None
        if func is torch.Tensor.__getitem__:
            return None if self.padded else self  # the zeros may lie outside the part
        if func in _ALL and len(args) == 1 and not kwargs:
            return Value(torch.tensor(not self.padded, device="cpu"))
        if func in _SUM and len(args) == 1 and not kwargs and not args[0].is_floating_point():
            return Count(args[0].numel(), self.padded)
        return None


@dataclass(frozen=True, slots=True)
class Count:
    """The host knows that the value is `full`; or, if `padded`, less."""

    full: int
    padded: bool

    def after(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Known | None:
        """See `Known`."""
        if func in _EQUAL and _compares_with(self.full, args):
            return Value(torch.tensor(not self.padded, device="cpu"))
        return None


def _compares_with(number: int, args: tuple[Any, ...]) -> bool:
    return len(args) == 2 and type(args[1]) in (int, bool) and args[1] == number


class KnownTensor(torch.Tensor):
    """A tensor that carries what the host knows of it, until it is written to."""

    _known: Known | None = None
    _version_known: int | None = None
    _plain: torch.Tensor
    _written: list[bool]
    """Not empty after a write that no version counter shows; shared by the carriers of one memory."""

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        copied: torch.Tensor = copy.deepcopy(self._plain, memo)
        return copied

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Answer reads from what the host knows; compute all else, and derive what the host knows of the result."""
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if type(func) is MethodWrapperType:
                out = func(*args)  # such as a shape or a device: the most frequent calls
                if isinstance(out, torch.Tensor):
                    args[0]._written.append(True)  # `data` has a version counter of its own
                return out
            func, asked = getattr(func, "__wrapped__", func), func  # an audit of calls, such as ours, wraps `func`
            subject = args[0] if args else None
            if func is torch.cat and subject:
                subject = subject[0]
            known = _known_now(subject) if isinstance(subject, KnownTensor) else None
            if func in _READ and isinstance(known, Value):
                return func(known.host, *args[1:], **kwargs)
            out = asked(*args, **kwargs)
            if not isinstance(subject, KnownTensor) or subject._written:
                return out
            unseen = subject.is_inference()  # an inference tensor has no version counter to show a write
            if isinstance(out, torch.Tensor) and (func in _MOVED or out is not subject):
                follows = None if known is None else known.after(func, args, kwargs)
                shared = (follows is not None or unseen) and _may_share(out, subject)
                if follows is not None or shared:
                    return carry(out, follows, subject._written if shared else None)
            elif func in _WRITTEN or out is subject or (unseen and isinstance(out, list | tuple)):
                subject._written.append(True)
        return out


def carry(tensor: torch.Tensor, known: Known | None, written: list[bool] | None = None) -> KnownTensor:
    """`tensor` as a carrier of `known`, on the same memory; `written` is that of other carriers there."""
    carrier = tensor.as_subclass(KnownTensor)
    with torch._C.DisableTorchFunctionSubclass():
        carrier._known, carrier._version_known = known, _version(carrier)
        carrier._written = [] if written is None else written
        carrier._plain = plain(tensor)
    return carrier


def plain(each: Any) -> Any:
    """The original tensor of a carrier; anything else unchanged."""
    return each._plain if isinstance(each, KnownTensor) else each


def known_of(tensor: Any) -> Known | None:
    """What the host knows of `tensor`; None for another kind of tensor, or after a write."""
    if not isinstance(tensor, KnownTensor):
        return None
    with torch._C.DisableTorchFunctionSubclass():
        return _known_now(tensor)


def _known_now(tensor: KnownTensor) -> Known | None:
    """As `known_of`, for callers that have disabled `__torch_function__`."""
    return tensor._known if not tensor._written and tensor._version_known == _version(tensor) else None


def _version(tensor: torch.Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


def _may_share(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether a write to one tensor may show in the other."""
    try:
        return bool(one.untyped_storage()._cdata == other.untyped_storage()._cdata)
    except NotImplementedError:  # `vmap`, with which transformers 4 makes masks, hides the memory
        return True


def _has_tensor(args: tuple[Any, ...]) -> bool:
    if all(type(each) in (int, slice) for each in args):
        return False  # the usual case in a step, where walking the leaves costs more than computing
    return any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(args))


def _known_mask(mask: Any) -> Any:
    if type(mask) is not torch.Tensor or mask.ndim != 2:
        return mask
    ones = mask == 1
    only_ones, also_zeros = torch.stack([ones.all(), (ones | (mask == 0)).all()]).tolist()
    return carry(mask, Padding(not only_ones)) if also_zeros else mask


def _compiles(model: Any, generation_config: Any, kwargs: dict[str, Any]) -> bool:
    """Whether transformers or the user compiles the forward, or a part of it."""
    return model._valid_auto_compile_criteria(kwargs, generation_config) or any(map(_is_compiled, model.modules()))


def _is_compiled(module: torch.nn.Module) -> bool:
    # By `module.compile()`, by `module.forward = torch.compile(module.forward)`, by `torch.compile(module)`.
    return (
        module._compiled_call_impl is not None
        or hasattr(module.forward, "_torchdynamo_orig_callable")
        or "_orig_mod" in module._modules
    )


_READ = {
    torch.Tensor.__bool__,
    torch.Tensor.__float__,
    torch.Tensor.__index__,
    torch.Tensor.__int__,
    torch.Tensor.item,
    torch.Tensor.tolist,
}
_COMPUTED = {
    torch.Tensor.__eq__,
    torch.Tensor.__getitem__,
    torch.Tensor.add,
    torch.Tensor.ge,
    torch.Tensor.gt,
    torch.Tensor.le,
    torch.Tensor.lt,
    torch.Tensor.max,
    torch.Tensor.min,
    torch.Tensor.ne,
    torch.Tensor.sub,
}
_MOVED = {
    torch.Tensor.bool,
    torch.Tensor.clone,
    torch.Tensor.contiguous,
    torch.Tensor.long,
    torch.Tensor.to,
    torch.Tensor.view,
}
_WRITTEN = {
    torch.Tensor.__array__,
    torch.Tensor.__dlpack__,
    torch.Tensor.__setitem__,
    torch.Tensor.data_ptr,
    torch.Tensor.numpy,
}
"""Write, or let others write."""
_EQUAL = {torch.Tensor.__eq__, torch.Tensor.eq, torch.eq}
_ALL = {torch.Tensor.all, torch.all}
_SUM = {torch.Tensor.sum, torch.sum}
