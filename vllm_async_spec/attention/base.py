"""The adapter protocol."""

from __future__ import annotations

import enum
from typing import Protocol, TypeVar

from vllm_async_spec.metadata import CommonAttentionMetadata

ArgumentsT = TypeVar("ArgumentsT", covariant=True)


class HostNeed(enum.Enum):
    """What an adapter reads of the sequence lengths on the host."""

    NONE = "none"
    """No length by request: device lengths and the scalars `max_query_len` and `max_seq_len` are enough."""
    UPPER_BOUND = "upper bound"
    """`seq_lens_cpu_upper_bound`: an upper bound by request, for sizes and plans. Never waits."""
    EXACT = "exact"
    """`seq_lens_cpu`: waits for the device if the host does not know the lengths."""


class Adapter(Protocol[ArgumentsT]):
    """Turns metadata into the arguments of one backend's kernels.

    An adapter must read no more than its `host_need`; the compatibility suite fails one that does.
    """

    name: str
    """The backend's name, as vLLM spells it where vLLM has it."""
    host_need: HostNeed

    def arguments(self, metadata: CommonAttentionMetadata) -> ArgumentsT:
        """The kernel's arguments for this batch; waits for the device only if `host_need` is `EXACT`."""
        ...
