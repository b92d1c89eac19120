"""Grafts the plugin's lazy host views onto vLLM's CommonAttentionMetadata, for each family of releases."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from vllm_async_spec.host_lengths import HostLengths, Trust, VllmHostLengths, host_values_of, with_host_values
from vllm_async_spec.patching import Transaction
from vllm_async_spec.vllm_plugin.ledger import Implementation, PatchError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from vllm_async_spec.vllm_plugin.upstream_batch import GraftedMetadata

    _ClassT = TypeVar("_ClassT", bound=type[DataclassInstance])

CLASS = "CommonAttentionMetadata"

_GRAFTED = (
    "seq_lens_cpu",
    "_seq_lens_cpu",
    "num_computed_tokens_cpu",
    "_num_computed_tokens_cpu",
    "num_computed_tokens",
    "seq_len_upper_bound",
    "prefetch_host",
    "seq_lens_changed",
)
# Callers pass host lengths under public names in some releases, and under private names in others.
_HOST_NAMES = {
    "seq_lens_cpu": "_seq_lens_cpu",
    "_seq_lens_cpu": "_seq_lens_cpu",
    "num_computed_tokens_cpu": "_num_computed_tokens_cpu",
    "_num_computed_tokens_cpu": "_num_computed_tokens_cpu",
}


def _requires_host_lengths(cls: type[DataclassInstance]) -> bool:
    field = cls.__dataclass_fields__.get("seq_lens_cpu")
    return field is not None and field.default is dataclasses.MISSING


def _graft(trust: Trust) -> Callable[[Transaction, ModuleType], None]:
    """Put the lazy host views on vLLM's class in place, because other modules imported the class by name."""

    def apply(transaction: Transaction, module: ModuleType) -> None:
        cls = getattr(module, CLASS)
        transaction.set(cls, "__dataclass_fields__", _fields_without_public_host_names(cls))
        for name in _GRAFTED:
            transaction.set(cls, name, (vars(HostLengths) | vars(VllmHostLengths))[name])
        transaction.set(cls, "host_trust", trust)
        transaction.set(cls, "__init__", _taking_optional_host_lengths(cls.__init__, trust))

    return apply


def _fields_without_public_host_names(cls: type[DataclassInstance]) -> dict[str, dataclasses.Field[object]]:
    """The dataclass's fields, changed so that `dataclasses.replace` copies only host lengths that are known."""
    fields = {}
    for name, field in cls.__dataclass_fields__.items():
        if name in _HOST_NAMES:
            field = copy.copy(field)
            field.name, field.default = _HOST_NAMES[name], None
        fields[field.name] = field
    return fields


def _taking_optional_host_lengths(original: Callable[..., None], trust: Trust) -> Callable[..., None]:
    """An `__init__` that accepts host lengths under any of their names, or none."""
    parameters = dict(list(inspect.signature(original).parameters.items())[1:])
    names = list(parameters)
    required = [name for name in _HOST_NAMES if name in names and parameters[name].default is inspect.Parameter.empty]
    foreign = frozenset(_HOST_NAMES) - set(names)

    @functools.wraps(original)
    def __init__(self: object, *args: Any, **kwargs: Any) -> None:
        given = {}
        if not foreign.isdisjoint(kwargs):
            given = {known: kwargs.pop(name) for name, known in _HOST_NAMES.items() if name in foreign & kwargs.keys()}
        for name in required:
            if name not in kwargs and name not in names[: len(args)]:
                kwargs[name] = given.pop(_HOST_NAMES[name], None)
        if trust is Trust.NONE:  # the views never return given values
            original(self, *args, **kwargs)
            return
        with host_values_of(self):
            original(self, *args, **kwargs)
            for name, value in given.items():
                setattr(self, name, value)

    return __init__


def _apply_unpadded(transaction: Transaction, module: ModuleType) -> None:
    cls = _grafted_class(getattr(module, CLASS))
    original = cls.unpadded
    reads_lengths = "seq_lens_cpu" in inspect.signature(cls.__init__).parameters  # a field of its own in 0.12

    @functools.wraps(original)
    def unpadded(self: GraftedMetadata, num_actual_tokens: int, num_actual_reqs: int) -> GraftedMetadata:
        unknown = self._seq_lens_cpu is None
        source = _bounded(self) if unknown and reads_lengths else self
        new = original(source, num_actual_tokens, num_actual_reqs)
        if unknown:
            new._seq_lens_cpu = new._num_computed_tokens_cpu = None
        bound = getattr(self, "seq_lens_cpu_upper_bound", None)
        if bound is not None:
            new.seq_lens_cpu_upper_bound = bound[:num_actual_reqs]
        return new

    transaction.set(cls, "unpadded", unpadded)


def _apply_micro_batches(transaction: Transaction, module: ModuleType) -> None:
    _grafted_class(getattr(module, CLASS))
    original = module._make_metadata_with_slice

    @functools.wraps(original)
    def _make_metadata_with_slice(ubatch_slice: object, attn_metadata: GraftedMetadata) -> object:
        unknown = attn_metadata._seq_lens_cpu is None
        new = original(ubatch_slice, _bounded(attn_metadata) if unknown else attn_metadata)
        if unknown:
            new._seq_lens_cpu = new._num_computed_tokens_cpu = None
        return new

    transaction.set(module, "_make_metadata_with_slice", _make_metadata_with_slice)


def _grafted_class(cls: type[GraftedMetadata]) -> type[GraftedMetadata]:
    if not hasattr(cls, "host_trust"):
        raise PatchError(f"{CLASS} has no lazy host lengths, because the patch that adds them was refused")
    return cls


def without_host_lengths(cls: _ClassT) -> _ClassT:
    """The class itself, after a check that its instances need no host lengths.

    Raises:
        PatchError: the class requires host lengths, because the patch that makes them optional was refused.
    """
    if _requires_host_lengths(cls):
        raise PatchError(f"{CLASS} requires host lengths, because the patch that makes them optional was refused")
    return cls


def _bounded(metadata: GraftedMetadata) -> Any:
    """A copy whose host lengths are the upper bound, for vLLM code that slices them and takes their maximum."""
    bound = torch.full((metadata.seq_lens.shape[0],), metadata.max_seq_len, dtype=torch.int32, device="cpu")
    return with_host_values(metadata, bound)


IMPLEMENTATIONS = {
    "metadata-optional-host-lengths": Implementation(_graft(Trust.RENEWED)),
    "metadata-counted-host-lengths": Implementation(_graft(Trust.UNCHANGED)),
    "metadata-restored-host-lengths": Implementation(_graft(Trust.NONE)),
    "metadata-unpadded": Implementation(_apply_unpadded),
    "metadata-micro-batches": Implementation(_apply_micro_batches),
}
