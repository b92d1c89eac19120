"""vLLM's FlashInfer builder with the plugin and a fake FlashInfer, as fixtures; batches for it and what it built."""

import dataclasses
import importlib
from collections.abc import Iterable, Iterator
from typing import Any

import fake_flashinfer
import pytest
import torch
from undone import ledger_of, undone

from vllm_async_spec.attention import flashinfer as adapter
from vllm_async_spec.compat import builders
from vllm_async_spec.compat.builder_inputs import HOPPER, stand_on
from vllm_async_spec.vllm_plugin.ledger import State
from vllm_async_spec.vllm_plugin.patches import flashinfer_builder, flashinfer_xqa

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


@pytest.fixture(scope="module")
def module(release: str) -> Any:
    if tuple(map(int, release.split("."))) < (0, 20):
        pytest.skip(f"vLLM {release} gives no upper bound to plan from")
    fake_flashinfer.install()
    with undone() as patch:
        patch.setattr(adapter, "_processors", lambda device: fake_flashinfer.PROCESSORS)
        # Each builder fills its own with zeros, and vLLM's 394 MiB take half a second.
        patch.setenv("VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE", str(16 << 20))
        patch.setattr(flashinfer_xqa, "xqa_source", lambda: "a fake")
        patch.setattr(flashinfer_builder, "_PLAN_BYTES", fake_flashinfer.INTS)
        module = importlib.import_module("vllm.v1.attention.backends.flashinfer")
        ledger = ledger_of(("flashinfer-builder", "flashinfer-xqa"))
        ledger.install()
        layer = importlib.import_module("vllm.v1.attention.backends.utils").PerLayerParameters(-1, None, 0.125)
        patch.setattr(module, "get_per_layer_parameters", lambda *arguments: {"layer": layer})
        # What the engine resolves at start-up, and a Triton kernel of vLLM's that copies page indices.
        if hasattr(module.FlashInferMetadataBuilder, "kv_cache_layout"):
            patch.setattr(module.FlashInferMetadataBuilder, "kv_cache_layout", None)
            patch.setattr(module, "get_flashinfer_layout_string", lambda layout: "NHD")
        patch.setattr(module, "_copy_page_indices_kernel", {(n,): lambda *a, **k: None for n in range(1, 64)})
        for outcome in ledger.outcomes.values():
            assert outcome.state in (State.APPLIED, State.NOT_NEEDED), outcome.detail
        assert ledger.outcomes["flashinfer-builder"].state is State.APPLIED
        yield module


@pytest.fixture(params=["fa2", "fa3"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(fake_flashinfer.Wrapper, "backend", request.param)
    return request.param


@pytest.fixture(scope="module", params=["native", "xqa"])
def setting(request: pytest.FixtureRequest, module: Any) -> Iterator[tuple[Any, ...]]:
    if request.param == "xqa" and not hasattr(module, "FlashInferDecodeKernel"):
        pytest.skip("this vLLM has no XQA")
    trtllm = None if request.param == "xqa" else False
    with builders.flashinfer_setting(
        spec_tokens=DRAFTS, block_size=PAGE, trtllm=trtllm, max_model_len=LONGEST
    ) as arguments:
        yield arguments


@pytest.fixture
def builder(module: Any, setting: tuple[Any, ...], kind: str) -> Any:
    return warmed(module.FlashInferBackend.get_builder_cls()(*setting))


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


def made_on(capability: tuple[int, int], module: Any, setting: tuple[Any, ...]) -> Any:
    stand_on(capability, "FlashInfer")
    try:
        return warmed(module.FlashInferBackend.get_builder_cls()(*setting))
    finally:
        stand_on(HOPPER, "FlashInfer")


def room(builder: Any, planned: int, tokens: int) -> int:
    heads = builder.num_qo_heads, builder.num_kv_heads, builder.head_dim
    return adapter.split_bytes(planned, tokens, *heads, builder.device)


def give_workspace(builder: Any, nbytes: int) -> torch.Tensor:
    builder._workspace_buffer = torch.empty(nbytes, dtype=torch.uint8)
    builder._prefill_wrapper = None
    return builder._workspace_buffer


def wrappers(built: Any) -> list[fake_flashinfer.Wrapper]:
    return [part.wrapper for part in (built.decode, built.prefill) if hasattr(part, "wrapper")]


def pages_planned(wrapper: fake_flashinfer.Wrapper) -> list[int]:
    plan = wrapper.plans[-1]
    return plan.get("paged_kv_indptr", plan.get("indptr")).diff().tolist()


def assert_before_empty(found: Iterable[list[int]], expected: list[int]) -> None:
    joined = [value for each in found for value in each]
    assert joined[: len(expected)] == expected
    assert not any(joined[len(expected) :])


def built_on_device(built: Any) -> int:
    """How many requests XQA takes, which is planned by nobody."""
    return built.num_decodes if hasattr(built.decode, "seq_lens") else 0
