"""Backends in plain PyTorch that attend: right ones, and some with one fault that only attending can show.

A part of the sentence that must be reported is in `fault`; the site that must be named ends in `# here`.
"""

import warnings
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from vllm_async_spec.attention.reference import ReferenceArguments, paged_attention


@dataclass
class Built:
    arguments: ReferenceArguments
    num_actual_tokens: int
    secret: Any = None
    """What nobody can compare: a function."""


class Builder:
    def __init__(self, device: torch.device) -> None:
        self.device = device

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Built:
        m = common_attn_metadata
        arguments = ReferenceArguments(
            m.query_start_loc, m.seq_lens, m.block_table_tensor, m.max_query_len, m.max_seq_len, causal=True
        )
        return Built(arguments, m.num_actual_tokens, self.secret(m))

    def build_for_drafting(self, common_attn_metadata: Any, draft_index: int) -> Built:
        return self.build(0, common_attn_metadata)

    def secret(self, metadata: Any) -> Any:
        return None


class Impl:
    def __init__(self, num_heads: int, head_size: int, scale: float, num_kv_heads: int, *more: Any) -> None:
        self.scale = scale

    def do_kv_cache_update(self, layer: Any, key: Any, value: Any, kv_cache: Any, slot_mapping: Any) -> None:
        # Padding goes to the first slot, which no table of the suite has.
        slots = slot_mapping.clamp(min=0)
        for cache, new in zip(kv_cache, (key, value), strict=True):
            cache.view(-1, *new.shape[1:]).index_copy_(0, slots, new)

    def arguments(self, built: Built) -> ReferenceArguments:
        return built.arguments

    def forward(
        self, layer: Any, query: Any, key: Any, value: Any, kv_cache: Any, attn_metadata: Any, output: Any
    ) -> Any:
        keys, values = kv_cache
        output.copy_(paged_attention(query, keys, values, self.arguments(attn_metadata), scale=self.scale))
        return output


def with_lengths(built: Built) -> ReferenceArguments:
    """With the secret for lengths, if there is one."""
    given, lengths = built.arguments, built.secret()
    if lengths is None:
        return given
    return replace(given, seq_lens=lengths.to(given.seq_lens.device, non_blocking=True), max_seq_len=8192)


class Right:
    """Attends to what it should."""

    fault: ClassVar[str | None] = None
    note: ClassVar[str | None] = None
    reason: ClassVar[str | None] = None
    builder: ClassVar[type[Builder]] = Builder
    impl: ClassVar[type[Impl]] = Impl

    @classmethod
    def get_builder_cls(cls) -> type[Builder]:
        return cls.builder

    @classmethod
    def get_impl_cls(cls) -> type[Impl]:
        return cls.impl

    @staticmethod
    def get_kv_cache_shape(blocks: int, block_size: int, kv_heads: int, head_size: int) -> tuple[int, ...]:
        return 2, blocks, block_size, kv_heads, head_size


class HeadsFirst(Right):
    """Its KV cache lies in memory in another order than its shape says."""

    class impl(Impl):
        def do_kv_cache_update(self, layer: Any, key: Any, value: Any, kv_cache: Any, slot_mapping: Any) -> None:
            slots = slot_mapping.clamp(min=0)
            for cache, new in zip(kv_cache, (key, value), strict=True):
                assert cache.stride(2) > cache.stride(1)
                cache[slots // cache.shape[1], slots % cache.shape[1]] = new

    @staticmethod
    def get_kv_cache_stride_order() -> tuple[int, ...]:
        return 0, 1, 3, 2, 4


class SecretBound(Right):
    """Tensors are right, and the kernel goes by the bound, which reaches it in a way that nobody compares."""

    fault = "attention is wrong"

    class builder(Builder):
        def secret(self, metadata: Any) -> Any:
            bound = metadata.seq_lens_cpu_upper_bound
            return lambda: bound

    class impl(Impl):
        def arguments(self, built: Built) -> ReferenceArguments:
            return with_lengths(built)


class SecretLengths(Right):
    """Host lengths of which it is not known that they are read: right without them."""

    note = "needs no host lengths, but uses them where they are given"

    impl = SecretBound.impl

    class builder(Builder):
        def secret(self, metadata: Any) -> Any:
            given = metadata._seq_lens_cpu
            return lambda: given


class SecretSizes(Right):
    """A plan that nobody compares has room for as many keys as the bound says, and without one for a single key."""

    builder = SecretBound.builder

    class impl(Impl):
        def arguments(self, built: Built) -> ReferenceArguments:
            given, bound = built.arguments, built.secret()
            room = (
                torch.ones_like(given.seq_lens) if bound is None else bound.to(given.seq_lens.device, non_blocking=True)
            )
            return replace(given, seq_lens=torch.minimum(given.seq_lens, room))


class LongestForAll(Right):
    """A kernel that takes all requests for as long as the longest."""

    fault = "attention is wrong"

    class impl(Impl):
        def arguments(self, built: Built) -> ReferenceArguments:
            given = built.arguments
            return replace(given, seq_lens=torch.full_like(given.seq_lens, given.max_seq_len))


class SeesRejected(Right):
    """One slot too many: that of a rejected draft."""

    fault = "attention is wrong"

    class impl(Impl):
        def arguments(self, built: Built) -> ReferenceArguments:
            given = built.arguments
            return replace(given, seq_lens=given.seq_lens + 1, max_seq_len=given.max_seq_len + 1)


class ForgetsTheStep(Right):
    """Keys of the step are not written."""

    fault = "attention is wrong"

    class impl(Impl):
        writes = 0

        def do_kv_cache_update(self, *arguments: Any) -> None:
            self.writes += 1
            if self.writes == 1:
                super().do_kv_cache_update(*arguments)


class NoNumber(Right):
    fault = "attention is wrong: it differs by up to nan"

    class impl(Impl):
        def forward(self, *arguments: Any, output: Any) -> Any:
            super().forward(*arguments, output=output)
            output[0, 0, 0].fill_(float("nan"))


class Reads(Right):
    fault = "in its forward it waits: read (item)"

    class impl(Impl):
        def arguments(self, built: Built) -> ReferenceArguments:
            longest = int(built.arguments.seq_lens.max().item())  # here
            return replace(built.arguments, max_seq_len=longest)


class Uploads(Right):
    """A blocking copy to the device."""

    fault = "in its forward it waits: copy to device (tensor)"

    class impl(Impl):
        def forward(self, layer: Any, query: Any, *arguments: Any, output: Any) -> Any:
            torch.tensor([0, 1], device=layer._k_scale.device)  # here
            return super().forward(layer, query, *arguments, output=output)


class Fails(Right):
    reason = "its forward fails: ValueError: no such head at support/compat_attention.py:"

    class impl(Impl):
        def forward(self, *arguments: Any, output: Any) -> Any:
            raise ValueError("no such head")


class FailsWithPrefills(Right):
    class impl(Impl):
        def forward(self, *arguments: Any, output: Any) -> Any:
            if arguments[5].arguments.max_query_len > 4:
                raise ValueError("no prefills")
            return super().forward(*arguments, output=output)


class Warns(Right):
    """Warns as PyTorch's sync debug mode does."""

    fault = "in its forward it waits: "

    class impl(Impl):
        def forward(self, *arguments: Any, output: Any) -> Any:
            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
            return super().forward(*arguments, output=output)


class Tunes:
    """Waits when it is given a size for the first time, as what is compiled or tuned for it does."""

    def __init__(self) -> None:
        self._known: set[int] = set()

    def __call__(self, built: Built) -> None:
        if built.arguments.max_seq_len not in self._known:
            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        self._known.add(built.arguments.max_seq_len)


class Compiles(Right):
    """Its kernels are tuned for a size when they are first given it: in a forward, and to build."""

    class builder(Builder):
        tune = Tunes()

        def build(self, *arguments: Any, **more: Any) -> Built:
            built = super().build(*arguments, **more)
            Compiles.builder.tune(built)
            return built

    class impl(Impl):
        tune = Tunes()

        def forward(self, *arguments: Any, output: Any) -> Any:
            Compiles.impl.tune(arguments[5])
            return super().forward(*arguments, output=output)


class Astray(Right):
    """Its kernel reads where nothing is."""

    class impl(Impl):
        def forward(self, layer: Any, query: Any, *arguments: Any, output: Any) -> Any:
            output.copy_(query[torch.full((1,), 1 << 40, device=query.device)])


class LooksAhead(SeesRejected):
    """As `SeesRejected`; among thousands of keys one of usual size would not be noticed."""


CLEAN = (Right, HeadsFirst)
FAULTY = tuple(
    kind
    for kind in list(globals().values())
    if isinstance(kind, type) and issubclass(kind, Right) and kind.fault is not None and kind is not Warns
)
