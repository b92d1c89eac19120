"""vLLM's builders of multi-head latent attention."""

import contextlib
import functools
import importlib
import inspect
import sys
import types
from collections.abc import Iterator
from typing import Any

import fake_flashinfer
import pytest
import torch
from on_device import on_device
from undone import ledger_of, undone

from vllm_async_spec import HostSyncError, reset_sync_report, sync_policy, sync_report
from vllm_async_spec.compat import builders
from vllm_async_spec.compat.builder_inputs import BuilderInputs
from vllm_async_spec.compat.cases import DRAFT_TOKENS as DRAFTS
from vllm_async_spec.compat.mla import mla_builder
from vllm_async_spec.host_lengths import with_host_values
from vllm_async_spec.vllm_plugin.ledger import State
from vllm_async_spec.vllm_plugin.patches import mla_prefill

PAGE = 64
BACKENDS = {
    "flashattn_mla": "FlashAttnMLABackend",
    "flashmla": "FlashMLABackend",
    "triton_mla": "TritonMLABackend",
    "flashinfer_mla": "FlashInferMLABackend",
    "cutlass_mla": "CutlassMLABackend",
}
DECODES = {
    "one token each": ([1, 1, 1], [33, 1, 100]),
    "drafts": ([4, 4, 4], [33, 17, 100]),
    "fewer drafts": ([4, 1, 3], [33, 17, 100]),
}
# The first request is decoded everywhere; the next two have contexts of 33 and 100, and a bound two and one too long.
DRAFTS_BEHIND = ([1, 4, 4], [20, 37, 104], [0, 2, 1])


@pytest.fixture(scope="module")
def patched(release: str) -> Iterator[State]:
    if tuple(map(int, release.split("."))) < (0, 18):
        pytest.skip(f"MLA's builders are made here from vLLM 0.18 on, and this is {release}")
    fake_flashinfer.install()
    decode = sys.modules["flashinfer.decode"]
    decode.__dict__.setdefault("trtllm_batch_decode_with_kv_cache_mla", None)
    with undone() as patch:
        if not torch.cuda.is_available():  # then PyTorch has neither pinned memory nor what some modules make at import
            for name in ("zeros", "empty", "tensor"):
                patch.setattr(torch, name, _on_the_cpu(getattr(torch, name)))
        importlib.import_module("vllm.model_executor.layers.attention.mla_attention")
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module("vllm.model_executor.layers.attention.sparse_mla_attention")
        ledger = ledger_of(mla_prefill.IMPLEMENTATIONS)
        ledger.install()
        yield ledger.outcomes["mla-prefill-lengths"].state


def _on_the_cpu(make: Any) -> Any:
    @functools.wraps(make)
    def made(*args: Any, pin_memory: bool = False, device: Any = None, **kwargs: Any) -> Any:
        return make(*args, device="cpu" if device == "cuda" else device, **kwargs)

    return made


@pytest.fixture
def takes_the_bound(patched: State) -> None:
    if patched is not State.APPLIED:
        pytest.skip("this vLLM fetches exact lengths, by a wait, whenever a request is on the prefill path")


@pytest.fixture(params=BACKENDS)
def builder(patched: State, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    try:
        module = importlib.import_module(f"vllm.v1.attention.backends.mla.{request.param}")
    except (ImportError, AssertionError, RuntimeError) as error:
        pytest.skip(f"{request.param} can't be imported without its kernels: {type(error).__name__}: {error}")
    if hasattr(module, "get_mla_metadata"):  # a kernel of FlashMLA's
        monkeypatch.setattr(module, "get_mla_metadata", lambda *args, **kwargs: (object(), None))
    return mla_builder(
        getattr(module, BACKENDS[request.param]).get_builder_cls(), BuilderInputs(torch.device("cpu")), PAGE
    )


def metadata(query: list[int], exact: list[int], slack: list[int]) -> Any:
    """What a runner gives: exact lengths on the device, and on the host a bound where there is one, else nothing."""
    bound = torch.tensor([length + more for length, more in zip(exact, slack, strict=True)], dtype=torch.int32)
    made = builders.common_metadata(query, bound.tolist(), block_size=PAGE)
    made.seq_lens = torch.tensor(exact, dtype=torch.int32)
    made.seq_lens_cpu = made.num_computed_tokens_cpu = None
    if hasattr(made, "is_prefilling"):
        made.is_prefilling = torch.tensor([count > 1 + DRAFTS for count in query])
    return made


def contexts(built: Any) -> list[int]:
    """How many keys of its context each request of the prefill path attends to, as kernels are told on the device."""
    context = built.prefill.chunked_context
    if not hasattr(context, "chunks"):
        return context.cu_seq_lens.diff(dim=1).sum(0).tolist()
    seen = [0] * built.num_prefills
    for chunk in context.chunks:
        for at, keys in enumerate(chunk.cu_seq_lens.diff().tolist(), chunk.request_slice.start):
            seen[at] += keys
    return seen


def stock_build(builder: Any, given: Any) -> Any:
    return inspect.unwrap(type(builder).build)(builder, 0, given)


@pytest.mark.parametrize("batch", DECODES)
def test_decoding_reads_nothing(builder: Any, batch: str):
    query, exact = DECODES[batch]
    given = metadata(query, exact, [DRAFTS] * len(query))
    kernels_take = builder.query_len_support.name
    if max(query) > 1 and kernels_take == "SINGLE_ONLY":
        pytest.skip("its kernel takes one token a request; see the tests of the prefill path")
    if batch == "fewer drafts" and kernels_take == "UNIFORM":
        pytest.skip("its kernel takes as many tokens of each request; see the tests of the prefill path")
    with sync_policy("error"), on_device(given) as reads:
        built = builder.build(0, given)
    assert dict(reads.now) == {}
    assert (built.num_decodes, built.num_prefills) == (len(query), 0)
    assert built.decode.seq_lens.tolist() == exact


def test_the_probe_sees_a_builder_that_reads(builder: Any, monkeypatch: pytest.MonkeyPatch):
    given = metadata(*DECODES["one token each"], [0, 0, 0])
    build_decode = type(builder)._build_decode

    def reading(self: Any, **given: Any) -> Any:
        given["seq_lens_device"].cpu()
        return build_decode(self, **given)

    monkeypatch.setattr(type(builder), "_build_decode", reading)
    with on_device(given) as reads:
        builder.build(0, given)
    assert dict(reads.now) == {"cpu": 1}


def test_drafts_on_the_prefill_path_have_exact_contexts(builder: Any, patched: State):
    query, exact, slack = DRAFTS_BEHIND
    given = metadata(query, exact, slack)
    reset_sync_report()
    built = builder.build(0, given)
    if builder.query_len_support.name == "VARLEN":
        assert (built.num_decodes, sync_report().count) == (3, 0), "its decode kernel takes them"
        return
    assert built.num_prefills == 2
    assert contexts(built) == [33, 100]
    if patched is State.APPLIED:
        assert (sync_report().count, sync_report().fallbacks) == (1, {"MLA drafts on the prefill path": 1})
        with sync_policy("error"), pytest.raises(HostSyncError, match="a blocking host read of seq_lens at"):
            builder.build(0, metadata(query, exact, slack))
        known = with_host_values(metadata(query, exact, slack), torch.tensor(exact, dtype=torch.int32))
        with sync_policy("error"):
            assert contexts(builder.build(0, known)) == [33, 100]
        assert sync_report().fallbacks == {"MLA drafts on the prefill path": 2}


@pytest.mark.usefixtures("takes_the_bound")
def test_stock_cuts_their_contexts_by_the_bound(builder: Any):
    if builder.query_len_support.name == "VARLEN":
        pytest.skip("its decode kernel takes drafts of different numbers")
    built = stock_build(builder, metadata(*DRAFTS_BEHIND))
    assert contexts(built) == [35, 101]


def test_so_have_those_of_sparse_mla(patched: State, release: str):
    try:
        module = importlib.import_module("vllm.model_executor.layers.attention.sparse_mla_attention")
    except ModuleNotFoundError:
        pytest.skip(f"sparse MLA has no dense prefill path in vLLM {release}")

    class Builder(module.SparseMLACommonMetadataBuilder):  # type: ignore[misc, name-defined]
        """The part that backends share; theirs need kernels."""

        reorder_batch_threshold = 1
        metadata_cls = types.SimpleNamespace

        def _build_req_id_per_token(self, common_attn_metadata: Any) -> None:
            """A Triton kernel in the later releases."""

    builder = mla_builder(Builder, BuilderInputs(torch.device("cpu")), PAGE)
    given = metadata(*DRAFTS_BEHIND)
    assert contexts(stock_build(builder, given)) == [35, 101]
    reset_sync_report()
    assert contexts(builder.build(0, given)) == [33, 100]
    assert (sync_report().count, sync_report().fallbacks) == (1, {"MLA drafts on the prefill path": 1})


@pytest.mark.usefixtures("takes_the_bound")
@pytest.mark.parametrize("drafts", [0, 3])
def test_prefills_read_nothing(builder: Any, drafts: int):
    first = 1 if builder.query_len_support.name == "SINGLE_ONLY" else 1 + drafts
    query, exact = [first, first, 600, 700], [20, 37, 640, 700]
    given = metadata(query, exact, [2, 1, 0, 0])
    with sync_policy("error"), on_device(given) as reads:
        built = builder.build(0, given)
    assert dict(reads.now) == {}
    assert built.num_decodes == 2
    assert contexts(built) == [40, 0]


def test_without_speculation_nothing_is_changed(builder: Any, patched: State, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(builder.vllm_config, "speculative_config", None)
    given = metadata([1, 600], [20, 640], [0, 0])
    if hasattr(given, "is_prefilling"):
        given.is_prefilling[:] = False  # a preempted request computes again what it had generated
    with sync_policy("error" if patched is State.APPLIED else "allow"):
        assert contexts(builder.build(0, given)) == [40]
