"""What `check` is given of a builder: how to make it, its batches, and a layer that attends with its metadata."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm_async_spec.compat.cases import BLOCK_SIZE, Case, MetadataFactory
from vllm_async_spec.compat.device import Device
from vllm_async_spec.compat.layer import Layer


@dataclass(frozen=True, slots=True)
class Subject:
    """A builder to be checked, with the name that the tables call it.

    Attributes:
        make: Makes a new builder on a device. May raise `SubjectError`.
        metadata: Makes the common metadata.
        source: Where the metadata's class comes from: `vLLM 0.32.0`, or `vllm-async-spec`.
        block_size: Tokens in a block of the KV cache.
        fields: Further fields of the common metadata for a batch.
        arguments: Further arguments of `build` for a batch; arguments that `build` does not take are left out.
        not_for: Why a batch does not apply; None if it does.
        may_refuse: Why the builder may fail with a batch; None if it must not.
        remakes: Fields of vLLM's names to which the builder gives another meaning.
        backend: The backend class, whose `supports_...` methods may allow a forward to fail; None if there is none.
        common_prefix: Tokens of the common prefix that `build` is given for a batch.
        device: The device that the builder needs; None for any.
        layout: Parts of names of fields that say where data lies, not how long it is. Sized by a bound, such fields
            may differ and still be right.
        layer: Makes, from the builder, a layer that attends with its metadata; or a string that says why there is
            none. May raise `NoForwardError`.
        model: The model whose numbers the builder gets; empty if the builder asks for none.
    """

    name: str
    make: Callable[[Device], Any]
    metadata: MetadataFactory
    source: str
    block_size: int = BLOCK_SIZE
    fields: Callable[[Case, Device], Mapping[str, Any]] = field(default=lambda case, device: {})
    arguments: Callable[[Case, Device], Mapping[str, Any]] = field(default=lambda case, device: {})
    not_for: Callable[[Case], str | None] = field(default=lambda case: None)
    may_refuse: Callable[[Case], str | None] = field(default=lambda case: None)
    remakes: tuple[str, ...] = ()
    backend: Any = None
    common_prefix: Callable[[Case], int] = field(default=lambda case: 0)
    device: Device | None = None
    layout: tuple[str, ...] = ()
    layer: Callable[[Any, Device], Layer] | str = "only the builder was given"
    model: str = ""
