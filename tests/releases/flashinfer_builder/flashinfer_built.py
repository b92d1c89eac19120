"""Batches for vLLM's FlashInfer builder, and what it built of them."""

import dataclasses
from collections.abc import Callable
from typing import Any

import fake_flashinfer
import pytest
import torch

from vllm_async_spec import reset_sync_report, sync_policy, sync_report
from vllm_async_spec.attention import flashinfer as adapter
from vllm_async_spec.compat import builders
from vllm_async_spec.compat.builder_inputs import HOPPER, stand_on

PAGE, DRAFTS, LONGEST = 16, 3, 8192
BATCHES = {
    "one token each": ([1, 1, 1], [33, 1, 48]),
    "drafts": ([4, 4, 4], [33, 17, 50]),
    "fewer drafts": ([4, 2, 3], [33, 17, 50]),
    "two tokens each": ([2, 2], [33, 17]),
    "mixed": ([4, 4, 9, 40], [33, 17, 30, 40]),
    "ragged and a prefill": ([1, 4, 2, 40], [16, 17, 65, 40]),
    "page boundary": ([4, 4, 4], [16, 17, 15]),
    "padded": ([4, 4, 0], [33, 17, 0]),
    "prompts": ([20, 9], [20, 30]),
}


def warmed(builder: Any) -> Any:
    builder.build(0, metadata([1, 9], [3, 9], 0))
    return builder


def metadata(query: list[int], exact: list[int], slack: int) -> Any:
    """What a runner gives: the device's lengths, and a bound that is exact for prefills only."""
    prefilling = torch.tensor([count > 1 + DRAFTS for count in query])
    made = builders.common_metadata(
        query, [length + slack * (length > 0) for length in exact], is_prefilling=prefilling
    )
    lengths = torch.tensor(exact, dtype=torch.int32)
    bound = torch.where(prefilling | (lengths == 0), lengths, lengths + slack)
    return dataclasses.replace(made, seq_lens=lengths, seq_lens_cpu_upper_bound=bound)


def metadata_of(batch: str, slack: int = DRAFTS) -> Any:
    return metadata(*BATCHES[batch], slack)


def made_on(capability: tuple[int, int], module: Any, setting: tuple[Any, ...]) -> Any:
    stand_on(capability, "FlashInfer")
    try:
        return warmed(module.FlashInferBackend.get_builder_cls()(*setting))
    finally:
        stand_on(HOPPER, "FlashInfer")


def change_new_builders(module: Any, monkeypatch: pytest.MonkeyPatch, change: Callable[[Any], object]) -> None:
    """Each builder is changed when vLLM's constructor has made it."""
    upstream = module.FlashInferBackend.get_builder_cls().__bases__[-1]
    made = upstream.__init__

    def changed(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        change(self)

    monkeypatch.setattr(upstream, "__init__", changed)


def built_without_a_wait(builder: Any, given: Any) -> Any:
    reset_sync_report()
    with sync_policy("error"):
        built = builder.build(0, given)
    assert (sync_report().count, sync_report().fallbacks) == (0, {})
    return built


def room(builder: Any, planned: int, requests: int) -> int:
    """For requests with four query tokens."""
    heads = builder.num_qo_heads, builder.num_kv_heads, builder.head_dim
    return adapter.split_bytes(planned, requests, 4, *heads, builder.device)


def give_workspace(builder: Any, nbytes: int) -> torch.Tensor:
    builder._workspace_buffer = torch.empty(nbytes, dtype=torch.uint8)
    builder._prefill_wrapper = None
    return builder._workspace_buffer


def wrappers(built: Any) -> list[fake_flashinfer.Wrapper]:
    return [part.wrapper for part in (built.decode, built.prefill) if hasattr(part, "wrapper")]


def lengths(built: Any) -> list[int]:
    """What kernels mask each planned request by."""
    return [length for each in wrappers(built) for length in each.lengths(PAGE)]


def pages_planned(built: Any) -> list[int]:
    plans = [each.plans[-1] for each in wrappers(built)]
    starts = [plan.get("paged_kv_indptr", plan.get("indptr")) for plan in plans]
    return [pages for each in starts for pages in each.diff().tolist()]


def assert_before_empty(found: list[int], expected: list[int]) -> None:
    assert found[: len(expected)] == expected
    assert not any(found[len(expected) :])


def built_on_device(built: Any) -> int:
    """How many requests XQA takes, which is planned by nobody."""
    return built.num_decodes if hasattr(built.decode, "seq_lens") else 0
