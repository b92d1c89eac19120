"""Snapshots of built metadata, compared field by field with metadata from exact host lengths."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from types import MemberDescriptorType
from typing import Any

import numpy as np
import torch

from vllm_async_spec.compat.cases import BLOCK_SIZE
from vllm_async_spec.compat.device import Device

_DEPTH = 8
_SCRATCH = 4 << 20
"""Bytes. Lengths and tables of the suite's batches need less, so a larger tensor is scratch memory of kernels."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """One value of a snapshot.

    Attributes:
        value: A copied tensor on the CPU, or a plain value.
        on_device: Whether kernels would read it, rather than the host.
        validated: Whether it is independent of kernels that did not run.
        own: Whether it is a whole buffer of the builder, which beyond the batch may hold data of other batches.
    """

    value: Any
    on_device: bool = False
    validated: bool = True
    own: bool = False


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The values in an object.

    Attributes:
        leaves: Values by path, such as `decode.seq_lens`.
        skipped: Descriptions of parts that can't be compared, such as functions, by path.
    """

    leaves: Mapping[str, Leaf]
    skipped: Mapping[str, str]

    @property
    def not_validated(self) -> tuple[str, ...]:
        """Paths to values that depend on a kernel that did not run."""
        return tuple(path for path, leaf in self.leaves.items() if not leaf.validated)


@dataclass(frozen=True, slots=True)
class Derived:
    """A value computed by an object's `compared`: the device's if any source is, validated if all sources are."""

    value: torch.Tensor
    sources: tuple[torch.Tensor, ...]


class Judgement(str, enum.Enum):
    """What a difference from the exact metadata means."""

    BOUNDED = "bounded"
    """Numbers on the host, nowhere less than the exact ones: a size."""
    LARGER = "larger"
    """A device tensor of a larger shape, sized by a bound; its contents are not judged."""
    WRONG = "wrong"
    """Any other difference: a kernel would read another value, or a host number is too small."""
    NOT_VALIDATED = "not validated"
    """The value depends on a kernel that did not run, or only a kernel can judge it."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One field that differs from the build with exact host lengths."""

    field: str
    judgement: Judgement
    exact: str
    found: str

    def __str__(self) -> str:
        return f"{self.field} is {self.found}, not {self.exact} ({self.judgement.value})"


def take(built: object, device: Device, builder: object = None) -> Snapshot:
    """Take a snapshot of `built`: dataclasses, named tuples, containers, objects with attributes, tensors, numbers.

    For an object with a method `compared`, take the values that this method returns by name.

    Args:
        built: What a builder made.
        device: Where it was made.
        builder: The builder; its own buffers are not compared beyond the part in use.
    """
    leaves: dict[str, Leaf] = {}
    skipped: dict[str, str] = {}
    values = [(path or "it", value) for path, value in _walk("", built, _DEPTH, set())]
    used, own = _parts_in_use(values, builder), _own(builder)
    for path, value in values:
        if isinstance(value, torch.Tensor) and value.nbytes > _SCRATCH:
            skipped[path] = f"scratch of {value.nbytes >> 20} MiB"
            continue
        leaf = _leaf(value, device)
        if leaf is None:
            skipped[path] = type(value).__name__
        elif isinstance(value, torch.Tensor) and _is_whole(value) and _storage(value) in used:
            skipped[path] = f"a buffer of which only {used[_storage(value)]} is used"
        else:
            kept = isinstance(value, torch.Tensor) and _is_whole(value) and _storage(value) in own
            leaves[path] = replace(leaf, own=kept)
    return Snapshot(leaves, skipped)


def differences(
    exact: Snapshot, found: Snapshot, unsteady: frozenset[str] = frozenset(), layout: tuple[str, ...] = ()
) -> tuple[Difference, ...]:
    """Where `found` is not `exact`.

    Args:
        exact: Built with exact host lengths.
        found: Built with other host lengths.
        unsteady: Paths to ignore, because they differ between two builds with exact lengths.
        layout: Parts of paths to fields that only the kernel can judge; their differences are `NOT_VALIDATED`.
    """
    result = []
    for path in dict.fromkeys([*exact.leaves, *found.leaves]):
        one, other = exact.leaves.get(path), found.leaves.get(path)
        if path in unsteady or (one is not None and other is not None and _same(one.value, other.value)):
            continue
        judgement = Judgement.NOT_VALIDATED if any(part in f".{path}" for part in layout) else _judge(one, other)
        result.append(Difference(path, judgement, _show(one), _show(other)))
    return tuple(result)


def kept_differences(
    alone: Snapshot, found: Snapshot, live: int, unsteady: frozenset[str] = frozenset(), layout: tuple[str, ...] = ()
) -> tuple[Difference, ...]:
    """Where `found`, built after other batches, is not `alone`, built by a new builder with the same knowledge.

    Only fields that both have are compared: a builder may plan again in a shorter way. Of a whole buffer of the
    builder only the entries of live requests are compared.

    Args:
        alone: Built by a new builder.
        found: Built by a builder that has built other batches.
        live: Requests of the batch without padding.
        unsteady: As for `differences`.
        layout: As for `differences`.
    """
    both = [path for path in alone.leaves if path in found.leaves]

    def part(snapshot: Snapshot) -> Snapshot:
        return Snapshot({path: _used(snapshot.leaves[path], live) for path in both}, {})

    return differences(part(alone), part(found), unsteady, layout)


def _used(leaf: Leaf, live: int) -> Leaf:
    return replace(leaf, value=leaf.value[:live]) if leaf.own and leaf.value.ndim > 0 else leaf


def _walk(path: str, value: object, depth: int, above: set[int]) -> Iterator[tuple[str, object]]:
    if depth == 0 or id(value) in above or isinstance(value, torch.Tensor | Derived | np.ndarray | enum.Enum | type):
        yield path, value
        return
    parts = _parts(value)
    if parts is None:
        yield path, value
        return
    for name, part in parts:
        yield from _walk(f"{path}.{name}" if path else name, part, depth - 1, above | {id(value)})


def _parts(value: object) -> list[tuple[str, object]] | None:
    """The parts of `value` by name; None if it has none."""
    if value is None or isinstance(value, bool | int | float | str | bytes | np.generic | torch.dtype | torch.device):
        return None
    if hasattr(type(value), "compared"):
        return list(value.compared().items())  # type: ignore[attr-defined]
    own = _attributes(value)
    if own is not None and "_pin_memory_int_workspace_buffer" in own:
        return list(_planned(value).items())
    if type(value).__name__ == "VllmConfig":  # kernel arguments carry it; it is no metadata
        return None
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(field.name, getattr(value, field.name, None)) for field in dataclasses.fields(value)]
    if isinstance(value, Mapping):
        return [(str(key), part) for key, part in value.items()]
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return list(value._asdict().items())
    if isinstance(value, Sequence):
        return [(str(at), part) for at, part in enumerate(value)]
    if isinstance(value, Set):
        return [(str(at), part) for at, part in enumerate(sorted(value, key=repr))]
    if callable(value) or own is None:
        return None
    return [(name, part) for name, part in own.items() if not callable(part)]


def _attributes(value: object) -> dict[str, object] | None:
    """What the object itself holds, without a call of its `__getattr__`; None if its class has no attributes."""
    classes = [vars(each) for each in type(value).__mro__ if "__slots__" in vars(each)]
    slots = {name: slot for each in classes for name, slot in each.items() if isinstance(slot, MemberDescriptorType)}
    found: dict[str, object] = {}
    for name, slot in slots.items():
        with contextlib.suppress(AttributeError):  # not set
            found[name] = slot.__get__(value)
    try:
        found |= object.__getattribute__(value, "__dict__")
    except AttributeError:
        return found if slots else None
    return found


def _planned(wrapper: Any) -> dict[str, object]:
    """What the caller of a flashinfer-python wrapper's `plan` gave it, under the names that `stubs` uses.

    The plan itself is not compared. It may keep the length of an earlier batch, and only kernels know which parts mask
    and which only distribute work; `forward` tests it by attending.
    """
    ends, last = (getattr(wrapper, f"_paged_kv_{name}_buf", None) for name in ("indptr", "last_page_len"))
    if ends is None or last is None:
        return {"queries": getattr(wrapper, "_qo_indptr_buf", None), "keys": getattr(wrapper, "_kv_indptr_buf", None)}
    if getattr(wrapper, "_backend", None) == "fa3":  # FA3 kernels take lengths from the plan, not from these buffers
        return {"queries": getattr(wrapper, "_qo_indptr_buf", None)}
    pages = ends[1:] - ends[:-1]
    lengths = torch.where(pages == 0, 0, (pages - 1) * BLOCK_SIZE + last[: len(pages)])
    return {"lengths": Derived(lengths, (ends, last)), "page ends": ends, "last page": last}


def _parts_in_use(values: list[tuple[str, object]], builder: object) -> dict[int, str]:
    """The builder's buffers that are in `values` both whole and in part: path of a part, by storage address.

    Beyond that part a buffer holds data of other batches.
    """
    own = _own(builder)
    tensors = [(path, value) for path, value in values if isinstance(value, torch.Tensor) and value.numel() > 0]
    whole = {_storage(value) for _, value in tensors if _is_whole(value)} & own
    return {_storage(value): path for path, value in tensors if not _is_whole(value) and _storage(value) in whole}


def _own(builder: object) -> set[int]:
    """Storage addresses of the builder's buffers."""
    held = vars(builder).values() if builder is not None and hasattr(builder, "__dict__") else ()
    return {_storage(each) for each in held if isinstance(each, torch.Tensor)}


def _is_whole(tensor: torch.Tensor) -> bool:
    return tensor.nbytes == tensor.untyped_storage().nbytes()


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _leaf(value: object, device: Device) -> Leaf | None:
    if isinstance(value, Derived):
        sources = value.sources
        validated = all(device.is_validated(each) for each in sources)
        return Leaf(value.value.cpu(), any(device.holds(each) for each in sources), validated)
    if isinstance(value, torch.Tensor):
        return Leaf(value.detach().cpu().clone(), device.holds(value), device.is_validated(value))
    if isinstance(value, np.ndarray):
        return Leaf(value.copy())
    if value is None or isinstance(value, bool | int | float | str | bytes | np.generic | enum.Enum | type):
        return Leaf(value)
    if isinstance(value, torch.dtype | torch.device):
        return Leaf(str(value))
    return None


def _same(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    return type(one) is type(other) and bool(one == other)


def _judge(exact: Leaf | None, found: Leaf | None) -> Judgement:
    if exact is None or found is None:
        return Judgement.WRONG
    if not (exact.validated and found.validated):
        return Judgement.NOT_VALIDATED
    if exact.on_device or found.on_device:
        return Judgement.LARGER if _is_larger(exact.value, found.value) else Judgement.WRONG
    return Judgement.BOUNDED if _is_bounded(exact.value, found.value) else Judgement.WRONG


def _is_larger(exact: object, found: object) -> bool:
    if not (isinstance(exact, torch.Tensor) and isinstance(found, torch.Tensor)):
        return False
    shapes = exact.shape, found.shape
    same_kind = exact.dtype == found.dtype and len(exact.shape) == len(found.shape)
    return same_kind and shapes[0] != shapes[1] and all(a <= b for a, b in zip(*shapes, strict=True))


def _is_bounded(exact: object, found: object) -> bool:
    numbers = _numbers(exact), _numbers(found)
    if numbers[0] is None or numbers[1] is None or numbers[0].dtype.kind != numbers[1].dtype.kind:
        return False
    same_shape = numbers[0].shape == numbers[1].shape
    return same_shape and bool((numbers[1] >= numbers[0]).all())


def _numbers(value: object) -> np.ndarray[Any, Any] | None:
    """`value` as an array if it holds numbers, else None; booleans and strings are no sizes."""
    if isinstance(value, torch.Tensor):
        value = value.numpy() if value.dtype is not torch.bfloat16 else None
    if value is None or isinstance(value, bool):
        return None
    array = np.asarray(value)
    return array if array.dtype.kind in "iuf" else None


def _show(leaf: Leaf | None) -> str:
    if leaf is None:
        return "missing"
    value = leaf.value
    if isinstance(value, torch.Tensor | np.ndarray):
        shape = tuple(value.shape)
        few = value.reshape(-1)[:8].tolist()
        return f"{few}" if value.ndim == 1 and shape[0] <= 8 else f"{few} ... {shape}"
    return repr(value)
