"""Inputs of a step whose values the host knows, so that `_sample` of transformers does not ask the device for them.

transformers decides by two inputs what a step does, and looks at them on the host, at each step:

    4.57    cache_position[-1] >= input_ids.shape[1]         with any cache
            padding_mask.all()                               with sdpa and a dynamic cache
    5.19    padding_mask.sum() == padding_mask.numel()       the same, where the batch is padded

What they say is known before the loop: positions go on by one, and a mask is continued with ones. So both stay what
they are, tensors of the device with the same values, and carry along what the host knows. Everything is still computed
on the device; only a read is answered here. An operation that is not followed below, in a transformers to come, gives
a tensor of which nothing is known: reading it waits, and is right.
"""

from __future__ import annotations

import contextlib
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
    """The arguments of `_sample`, those that a step looks at known to the host, while it runs; reads the device, once.

    Left alone are 4-D masks and masks of anything but ones and zeros. A forward that is compiled is given plain
    tensors, because it would be compiled anew for each value that is known. It reads no mask, so masks are left alone
    there too; positions are known until the inputs of a step are prepared. Flex attention compiles its masks while
    they are prepared, and there all is left alone.

    Args:
        model: a `GenerationMixin`.
        input_ids: int64 (batch, length), the prompts.
        generation_config: the prepared configuration.
        kwargs: what `_sample` is given for the model.
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
    if has_positions:  # as `_sample` begins where there are such positions
        known = model._get_initial_cache_position(input_ids.shape[1], input_ids.device, known)
        positions = known["cache_position"]
        known["cache_position"] = carry(positions, Value(positions.cpu()))
    with inputs_after(model, plain) if compiled and has_positions else contextlib.nullcontext():
        yield known


def inputs_after(model: Any, change: Callable[[Any], Any]) -> AbstractContextManager[None]:
    """Have `model.prepare_inputs_for_generation` return what `change` makes of its inputs.

    It is the last of transformers' own code that sees them before the forward, and the only seam there: what it was
    given it may have read. Threads may generate with one model at a time, if each brings the same `change`.

    Args:
        model: a `GenerationMixin`.
        change: from one input to the one that the forward is given.
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
        """What it therefore knows of what `func` makes of the tensor, and of its other arguments; None if nothing."""
        ...


@dataclass(frozen=True, slots=True)
class Value:
    """All of it."""

    host: torch.Tensor

    def after(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Known | None:
        """See `Known`."""
        if func in _COMPUTED and not kwargs and not _has_tensor(args[1:]):
            return Value(func(self.host, *args[1:]))
        return None


@dataclass(frozen=True, slots=True)
class Padding:
    """That all are ones; or, if `padded`, that they are ones and at least one zero."""

    padded: bool

    def after(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Known | None:
        """See `Known`."""
        if func in _MOVED or (func in _EQUAL and args[1] == 1):
            return self
        if func is torch.Tensor.new_ones:
            return Padding(False)
        if func is torch.cat:
            parts = [known_of(part) for part in args[0]]
            found = [each.padded for each in parts if isinstance(each, Padding)]
            return Padding(any(found)) if len(found) == len(parts) else None
        if func is torch.Tensor.__getitem__:
            return None if self.padded else self  # the zeros may be elsewhere
        if func in _ALL and len(args) == 1 and not kwargs:
            return Value(torch.tensor(not self.padded, device="cpu"))
        if func in _SUM and len(args) == 1 and not kwargs and not args[0].is_floating_point():
            return Count(args[0].numel(), self.padded)
        return None


@dataclass(frozen=True, slots=True)
class Count:
    """That it is `full`, or, if `padded`, less."""

    full: int
    padded: bool

    def after(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Known | None:
        """See `Known`."""
        if func in _EQUAL and not isinstance(args[1], torch.Tensor) and args[1] == self.full:
            return Value(torch.tensor(not self.padded, device="cpu"))
        return None


class KnownTensor(torch.Tensor):
    """A tensor that carries along what the host knows of it, until it is written to."""

    _known: Known | None = None
    _version_known: int | None = None
    _plain: torch.Tensor

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Answer a read of what is known; compute all else, and carry along what follows from what is known."""
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if type(func) is MethodWrapperType:
                return func(*args)  # a shape, a device: most of what is asked, and nothing follows from what is known
            func, asked = getattr(func, "__wrapped__", func), func  # by whoever watches calls, as our audit does
            subject = args[0] if args else None
            if func is torch.cat and subject:
                subject = subject[0]
            known = _known_now(subject) if isinstance(subject, KnownTensor) else None
            if func in _READ and isinstance(known, Value):
                return func(known.host, *args[1:], **kwargs)
            out = asked(*args, **kwargs)
            if func not in _MOVED and (out is subject or func is torch.Tensor.__setitem__):
                if isinstance(subject, KnownTensor):
                    subject._known = None  # written to; an inference tensor has no version that would show it
            elif known is not None and isinstance(out, torch.Tensor):
                follows = known.after(func, args, kwargs)
                return out if follows is None else carry(out, follows)
        return out


def carry(tensor: torch.Tensor, known: Known) -> KnownTensor:
    """`tensor`, the same memory, carrying along what is known of it."""
    carrier = tensor.as_subclass(KnownTensor)
    with torch._C.DisableTorchFunctionSubclass():
        carrier._known, carrier._version_known = known, _version(carrier)
        carrier._plain = plain(tensor)
    return carrier


def plain(each: Any) -> Any:
    """The tensor that was made a carrier; anything else as it is."""
    return each._plain if isinstance(each, KnownTensor) else each


def known_of(tensor: Any) -> Known | None:
    """What the host knows of it; None of a tensor of another kind, and of one that was written to since."""
    if not isinstance(tensor, KnownTensor):
        return None
    with torch._C.DisableTorchFunctionSubclass():
        return _known_now(tensor)


def _known_now(tensor: KnownTensor) -> Known | None:
    """See `known_of`; where no operation comes back to the class."""
    return tensor._known if tensor._version_known == _version(tensor) else None


def _version(tensor: torch.Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


def _has_tensor(args: tuple[Any, ...]) -> bool:
    if all(type(each) in (int, slice) for each in args):
        return False  # as in a step, where to look at leaves costs more than to compute
    return any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(args))


def _known_mask(mask: Any) -> Any:
    if type(mask) is not torch.Tensor or mask.ndim != 2:
        return mask
    ones = mask == 1
    only_ones, also_zeros = torch.stack([ones.all(), (ones | (mask == 0)).all()]).tolist()
    return carry(mask, Padding(not only_ones)) if also_zeros else mask


def _compiles(model: Any, generation_config: Any, kwargs: dict[str, Any]) -> bool:
    """Whether transformers or the user compiles the forward, or some of it."""
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
_EQUAL = {torch.Tensor.__eq__, torch.Tensor.eq, torch.eq}
_ALL = {torch.Tensor.all, torch.all}
_SUM = {torch.Tensor.sum, torch.sum}
