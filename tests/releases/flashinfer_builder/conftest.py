"""vLLM's FlashInfer builder with the plugin and a fake FlashInfer."""

import importlib
from collections.abc import Iterator
from typing import Any

import fake_flashinfer
import pytest
from flashinfer_built import DRAFTS, LONGEST, PAGE, warmed
from undone import ledger_of, undone

from vllm_async_spec.attention import flashinfer as adapter
from vllm_async_spec.compat import builders
from vllm_async_spec.vllm_plugin.ledger import State
from vllm_async_spec.vllm_plugin.patches import flashinfer_builder, flashinfer_xqa


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
