"""A device that has yet to run what the host has launched.

A `DeviceTensor`'s operators are queued on a stream. They run when the host waits for an event behind them, or at
a random moment before. A copy from the host reads its source then; one to the host has landed only after a wait.
So a missing wait goes wrong as on a GPU, but by a seed. `wait_stream`, `wait_event` and events order the streams.
Operators run in one thread. Not seen: memory that the caching allocator hands out again, and time.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch._dynamo  # PyTorch would import it later, when its names are already stand-ins
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from simulation.streams import Event, Stream

DEVICE = torch.device("cuda", 0)
_CHANCES_TO_RUN = (0.0, 0.005, 0.02)
"""That the device gets on when an operator is launched; with the first it does so only when it is waited for."""
_MOST_AT_ONCE = 60


class Gpu:
    """The device: its streams, and how late it is.

    Args:
        late: Where its delays come from. None is a device that runs everything at once.
    """

    def __init__(self, late: random.Random | None) -> None:
        self.late = late
        self.chance_to_run = 1.0 if late is None else late.choice(_CHANCES_TO_RUN)
        self.default = Stream(self)
        self.current = self.default
        self.streams = [self.default]
        self.waits: list[str] = []

    def launch(self, run: Callable[[], Any]) -> None:
        self.current.queue.append(run)
        self.current.launched += 1
        if self.late is None:
            self.finish()
        elif self.late.random() < self.chance_to_run:
            self.run_some(self.late)

    def run_some(self, late: random.Random) -> None:
        for _ in range(late.randrange(_MOST_AT_ONCE)):
            late.choice(self.streams).run_one()

    def finish(self) -> None:
        for stream in self.streams:
            stream.run_until(stream.launched)

    def wait(self, what: str) -> None:
        self.waits.append(what)
        self.finish()

    def kernel(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor) and not isinstance(leaf, DeviceTensor):
                raise RuntimeError(f"{function} was given a tensor of the host's, of shape {tuple(leaf.shape)}")
        plain_args, plain_kwargs = tree_map(_plain, (args, kwargs))
        self.launch(lambda: function(*plain_args, **plain_kwargs))

    def place(self, tensor: torch.Tensor) -> DeviceTensor:
        return DeviceTensor(tensor, self)

    def snapshot(self, values: Any) -> Any:
        """A copy of `values` as they are when the device gets here; readable once it has."""
        copies = tree_map(lambda leaf: leaf.inner.clone() if isinstance(leaf, DeviceTensor) else leaf, values)
        pairs = [
            (copy, leaf.inner)
            for copy, leaf in zip(tree_leaves(copies), tree_leaves(values), strict=True)
            if isinstance(leaf, DeviceTensor)
        ]

        def copy_all() -> None:
            for copy, inner in pairs:
                copy.copy_(inner)

        self.launch(copy_all)
        return copies

    @contextlib.contextmanager
    def active(self) -> Iterator[Gpu]:
        """Make `cuda` mean this device, within, on this thread."""
        with contextlib.ExitStack() as stack:
            for target, name, stand_in in (
                (torch.cuda, "Stream", self._class(Stream)),
                (torch.cuda, "Event", self._class(Event)),
                (torch, "Event", self._class(Event)),
                (torch.cuda, "current_stream", lambda device=None: self.current),
                (torch.cuda, "default_stream", lambda device=None: self.default),
                (torch.cuda, "stream", self._on),
                (torch.cuda, "synchronize", lambda device=None: self.wait("device")),
                (torch.accelerator, "synchronize", lambda device=None: self.wait("device")),
            ):
                stack.enter_context(mock.patch.object(target, name, stand_in))
            stack.enter_context(_Sides(self))
            yield self

    def _class(self, of: type) -> type:
        # A class, for vLLM and PyTorch name these in annotations and as bases.
        return type(of.__name__, (of,), {"__init__": lambda made, *args, **kwargs: of.__init__(made, self)})

    @contextlib.contextmanager
    def _on(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before


class DeviceTensor(torch.Tensor):
    """Device memory. Shape and strides are known, contents only when the device has got there."""

    inner: torch.Tensor
    gpu: Gpu
    writes: list[int]
    """How often it, or a view of it, was written in place: counted at the launch, as PyTorch counts versions."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor, gpu: Gpu, writes: list[int] | None = None) -> DeviceTensor:
        # To PyTorch it is on the CPU, for a build without CUDA can't index what is not. Python sees a CUDA tensor.
        # It is no inference tensor, for vLLM 0.24 makes buffers that are none, whose views must have versions, too.
        with torch.inference_mode(False):
            made = torch.Tensor._make_wrapper_subclass(
                cls, inner.size(), strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype
            )
        made.inner, made.gpu, made.writes = inner, gpu, [0] if writes is None else writes
        return made

    def __init__(self, inner: torch.Tensor, gpu: Gpu, writes: list[int] | None = None) -> None:
        pass

    __torch_function__ = torch._C._disabled_torch_function_impl
    device = property(lambda self: DEVICE)
    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)
    _version = property(lambda self: self.writes[0])

    def is_inference(self) -> bool:
        """No: vLLM makes its buffers before its steps run in inference mode, and views of them are none either."""
        return False

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def __repr__(self, **kwargs: Any) -> str:
        return f"DeviceTensor(shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        gpu = next(leaf.gpu for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, DeviceTensor))
        return _dispatch(gpu, func, args, kwargs or {})


_ATEN = torch.ops.aten
_VALUES = {_ATEN.item.default, _ATEN._local_scalar_dense.default, _ATEN.is_nonzero.default, _ATEN.equal.default}
_SHAPES = {_ATEN.nonzero.default, _ATEN.masked_select.default, _ATEN._unique2.default, _ATEN.bincount.default}
_UNINITIALISED = {_ATEN.new_empty.default, _ATEN.empty_like.default, _ATEN.new_empty_strided.default}
_INDEX = {_ATEN.index.Tensor, _ATEN.index_put_.default, _ATEN.index_put.default, _ATEN._index_put_impl_.default}


def _plain(value: Any) -> Any:
    return value.inner if isinstance(value, DeviceTensor) else value


def _dispatch(gpu: Gpu, func: Any, args: Any, kwargs: Any) -> Any:
    if func in _VALUES:
        gpu.wait(func.__name__)
        return func(*tree_map(_plain, args), **tree_map(_plain, kwargs))
    if func is _ATEN.copy_.default:
        return _copy(gpu, *args, **kwargs)
    if func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd):
        return func.decompose(*args, **kwargs)
    schema = func._schema
    aliased = [result.alias_info for result in schema.returns if result.alias_info is not None]
    if aliased and not any(alias.is_write for alias in aliased):
        view = func(*tree_map(_plain, args), **tree_map(_plain, kwargs))
        writes = next(leaf.writes for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, DeviceTensor))
        return tree_map(lambda leaf: DeviceTensor(leaf, gpu, writes) if isinstance(leaf, torch.Tensor) else leaf, view)
    needs_shape = (
        func in _SHAPES
        or (func is _ATEN.repeat_interleave.Tensor and kwargs.get("output_size") is None)
        or (func in _INDEX and any(i is not None and i.dtype is torch.bool and i.ndim for i in args[1]))
    )
    if needs_shape and func is not _ATEN.index_put_.default:
        gpu.wait(func.__name__)
        made = func(*tree_map(_plain, args), **tree_map(_plain, kwargs))
        return tree_map(lambda leaf: DeviceTensor(leaf, gpu) if isinstance(leaf, torch.Tensor) else leaf, made)
    args, kwargs = _without_host_tensors(gpu, func, args, kwargs)
    plain_args, plain_kwargs = tree_map(_plain, (list(args), kwargs))
    written = [
        args[at] if at < len(args) else kwargs.get(argument.name)
        for at, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    if written:
        _count_writes(written)
        gpu.launch(lambda: func(*plain_args, **plain_kwargs))
        return written[0] if len(schema.returns) == 1 else tuple(written)
    plain_kwargs.pop("device", None)
    outputs = _allocate(func, plain_args, plain_kwargs)
    if func in _UNINITIALISED:
        return DeviceTensor(outputs, gpu)

    def compute() -> None:
        for output, result in zip(tree_leaves(outputs), tree_leaves(func(*plain_args, **plain_kwargs)), strict=True):
            output.copy_(result)

    gpu.launch(compute)
    return tree_map(lambda leaf: DeviceTensor(leaf, gpu) if isinstance(leaf, torch.Tensor) else leaf, outputs)


def _count_writes(written: list[Any]) -> None:
    for leaf in tree_leaves(written):
        if isinstance(leaf, DeviceTensor):
            leaf.writes[0] += 1


def _without_host_tensors(gpu: Gpu, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Scalars and indices may be the host's; the first are read now, and for the second the host waits."""

    def check(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or isinstance(leaf, DeviceTensor):
            return leaf
        if leaf.ndim and func not in _INDEX:
            raise RuntimeError(f"{func}: one tensor is on the device and another, of shape {tuple(leaf.shape)}, is not")
        if leaf.ndim:
            gpu.wait("index on the host")
        return leaf.clone()

    return tree_map(check, (list(args), kwargs))  # type: ignore[return-value]


_made: dict[Any, Any] = {}


def _allocate(func: Any, args: Any, kwargs: Any) -> Any:
    """Memory for the results, whose shapes are those that the operator has on tensors without contents."""
    key = repr(tree_map(_signature, (func, args, kwargs)))
    if key not in _made:
        _made[key] = func(*tree_map(_to_meta, args), **tree_map(_to_meta, kwargs))
    return tree_map(
        lambda leaf: (
            torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype).fill_(_garbage(leaf.dtype))
            if isinstance(leaf, torch.Tensor)
            else leaf
        ),
        _made[key],
    )


def _signature(leaf: Any) -> Any:
    return ("tensor", leaf.shape, leaf.stride(), leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf


def _to_meta(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")


def _garbage(dtype: torch.dtype) -> int:
    return 1 if dtype is torch.bool else 77


def _copy(gpu: Gpu, target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    to, of = _plain(target), _plain(source)
    on_both = isinstance(target, DeviceTensor) and isinstance(source, DeviceTensor)
    if isinstance(target, DeviceTensor) and not on_both and (not non_blocking or not source.ndim):
        of = source.clone()  # a blocking copy has read its source when it returns
    _count_writes([target])
    gpu.launch(lambda: to.copy_(of))
    if not non_blocking and not on_both:
        gpu.wait("copy_")
    return target


class _Sides(TorchFunctionMode):
    """Sends what is made on `cuda`, or moved there, to the device."""

    def __init__(self, gpu: Gpu) -> None:
        super().__init__()
        self._gpu = gpu
        self._special: dict[Any, Callable[..., Any]] = {
            torch.Tensor.to: self._to,
            torch.Tensor.cpu: lambda tensor, *args, **kwargs: self._to(tensor, "cpu"),
            torch.Tensor.cuda: lambda tensor, *args, **kwargs: self._to(tensor, "cuda", **kwargs),
            torch.Tensor.tolist: lambda tensor: self._to(tensor, "cpu").tolist(),
            torch.Tensor.pin_memory: lambda tensor, *args: tensor,
            torch.Tensor.is_pinned: lambda tensor, *args: not isinstance(tensor, DeviceTensor),
            torch._foreach_copy_: self._copy_each,
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if (special := self._special.get(func)) is not None:
            return special(*args, **kwargs)
        kwargs.pop("pin_memory", None)  # a CPU build of PyTorch refuses it
        device = kwargs.pop("device", None)
        if device is None:
            return func(*args, **kwargs)
        device = torch.device(device)
        made = func(*args, **kwargs, **({} if device.type == "cuda" else {"device": device}))
        if device.type == "cuda" and isinstance(made, torch.Tensor) and not isinstance(made, DeviceTensor):
            return DeviceTensor(made.fill_(_garbage(made.dtype)) if func is torch.empty else made, self._gpu)
        return made

    @staticmethod
    def _copy_each(targets: Any, sources: Any, non_blocking: bool = False) -> None:
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source, non_blocking=non_blocking)

    def _to(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """`Tensor.to`, in any of its forms: `(device, dtype, non_blocking)`, `(dtype, non_blocking)`, `(other)`."""
        device = kwargs.pop("device", None)
        non_blocking, copy = kwargs.pop("non_blocking", False), kwargs.pop("copy", False)
        dtype = kwargs.pop("dtype", None)
        for arg in args:
            if isinstance(arg, bool):
                non_blocking = arg
            elif isinstance(arg, torch.dtype):
                dtype = arg
            elif isinstance(arg, torch.Tensor):
                device, dtype = arg.device, arg.dtype
            elif arg is not None:
                device = arg
        held = isinstance(tensor, DeviceTensor)
        wanted = held if device is None else torch.device(device).type == "cuda"
        if wanted == held:
            return tensor.to(dtype=dtype or tensor.dtype, copy=copy)
        if not wanted:
            host = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
            host.fill_(_garbage(host.dtype)).copy_(tensor, non_blocking=non_blocking)
            return host if dtype is None else host.to(dtype)
        source = tensor if dtype is None else tensor.to(dtype)
        moved = DeviceTensor(torch.empty_like(source).fill_(_garbage(source.dtype)), self._gpu)
        return moved.copy_(source, non_blocking=non_blocking)
