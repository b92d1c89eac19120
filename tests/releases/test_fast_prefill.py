"""Fast prefill of models that share KV caches."""

import importlib
import inspect
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from on_device import on_device
from undone import applied

from vllm_async_spec import HostSyncError, reset_sync_report, sync_policy, sync_report
from vllm_async_spec.audit.host_reads import CpuProbe
from vllm_async_spec.compat import builders
from vllm_async_spec.vllm_plugin.ledger import find_patch
from vllm_async_spec.vllm_plugin.patches import fast_prefill

BATCHES: dict[str, tuple[list[int], list[int], list[int] | None]] = {
    # query lengths, lengths, draft tokens of each request
    "prefills": ([15, 5, 8], [41, 31, 40], None),
    "prefill and decodes": ([1, 1, 30], [20, 33, 30], None),
    "drafts and a prefill": ([4, 4, 30], [20, 33, 30], [3, 3, 0]),
    "fewer drafts": ([4, 1, 3, 9], [20, 33, 17, 9], [3, 0, 2, 0]),
    "drafts behind a prefill's last chunk": ([6, 4], [40, 33], [3, 3]),
}
PADDED = 24


@pytest.fixture(scope="module")
def stock(release: str) -> Iterator[Any]:
    own = utils().make_kv_sharing_fast_prefill_common_attn_metadata
    for module in ("vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu.attn_utils"):
        importlib.import_module(module)
    with applied(*[name for name in fast_prefill.IMPLEMENTATIONS if release in find_patch(name).releases]):
        yield own


def utils() -> Any:
    return importlib.import_module("vllm.v1.attention.backends.utils")


def cut(given: Any) -> Any:
    return utils().make_kv_sharing_fast_prefill_common_attn_metadata(given)


def runner(query: list[int]) -> Any:
    module = importlib.import_module("vllm.v1.worker.gpu_model_runner")
    made = object.__new__(module.GPUModelRunner)
    made.device = torch.device("cpu")
    made.pin_memory = False
    made.arange_np = np.arange(1000)
    made._arange_scratch = np.empty(1000, dtype=np.int64)
    made.input_ids = types.SimpleNamespace(gpu=torch.zeros(1000, dtype=torch.int32))
    made.input_batch = types.SimpleNamespace(num_reqs=len(query))
    # The runner's buffer is longer than the batch, and repeats its end.
    starts = np.concatenate([[0], np.cumsum(query), [sum(query)] * 2]).astype(np.int32)
    made.query_start_loc = types.SimpleNamespace(np=starts)
    made.kv_sharing_fast_prefill_logits_indices = torch.full((100,), 99, dtype=torch.int32)
    made.cudagraph_batch_sizes = [PADDED]
    made.compilation_config = types.SimpleNamespace(cudagraph_mode=module.CUDAGraphMode.PIECEWISE)
    made.vllm_config = types.SimpleNamespace(pad_for_cudagraph=lambda count: PADDED)
    made.cudagraph_dispatcher = types.SimpleNamespace(
        dispatch=lambda *args, **kwargs: (None, types.SimpleNamespace(num_tokens=PADDED))
    )
    return made


def metadata(query: list[int], exact: list[int], drafts: list[int] | None, *, padding: int = 0) -> Any:
    made = builders.common_metadata(query + [0] * padding, exact + [0] * padding)
    made.seq_lens_cpu = made.num_computed_tokens_cpu = None
    worker = runner(query)
    if drafts is None:
        indices = made.query_start_loc[1 : len(query) + 1] - 1
    else:
        counts = np.array(drafts, dtype=np.int32)
        indices = worker._calc_spec_decode_metadata(counts, np.cumsum(query, dtype=np.int32)).logits_indices
    probe = CpuProbe()
    probe.mark(indices, 0)
    with probe as reads:
        made.logits_indices_padded = worker._prepare_kv_sharing_fast_prefill(indices)
    assert dict(reads.now) == {}, "the runner waits for the device"
    assert made.logits_indices_padded.tolist() == indices.tolist() + [sum(query) - 1] * (PADDED - len(indices))
    made.num_logits_indices = len(indices)
    if hasattr(made, "max_logits_per_req"):
        made.max_logits_per_req = 1 + max(drafts or [0])
    return made


@pytest.mark.parametrize("padding", [0, 2])
@pytest.mark.parametrize("batch", BATCHES)
def test_it_is_stocks_without_a_read_or_a_race(stock: Any, batch: str, padding: int):
    given = metadata(*BATCHES[batch], padding=padding)
    probe = on_device(given, "logits_indices_padded")
    reset_sync_report()
    with sync_policy("error"), probe as reads:
        made = cut(given)
    assert (sync_report().count, sync_report().fallbacks, dict(reads.now)) == (0, {}, {})
    assert probe.step_of(made.query_start_loc) == 0
    assert probe.step_of(made.query_start_loc_cpu) is None, "it came from the device"
    expected = stock(given)
    for name in ("query_start_loc", "query_start_loc_cpu", "seq_lens", "block_table_tensor", "slot_mapping"):
        got, wanted = getattr(made, name), getattr(expected, name)
        assert got.dtype == wanted.dtype, name
        assert torch.equal(got, wanted), name
    for name in ("num_reqs", "num_actual_tokens", "max_query_len", "max_seq_len", "causal"):
        assert getattr(made, name) == getattr(expected, name), name
    assert torch.equal(made.seq_lens_cpu, expected.seq_lens_cpu)


def test_stock_takes_the_offsets_from_a_copy_that_nobody_waits_for(stock: Any):
    given = metadata(*BATCHES["drafts and a prefill"])
    probe = on_device(given, "logits_indices_padded")
    copies = []
    probe.copying = copies.append  # type: ignore[method-assign]
    with probe as reads:
        made = stock(given)
    assert any(copy is made.query_start_loc_cpu for copy in copies)
    waits = "item" in stock.__code__.co_names
    assert (reads.now.total() > 0) is waits


@pytest.mark.parametrize("backend", ["flash_attn:FlashAttentionBackend", "triton_attn:TritonAttentionBackend"])
def test_a_builder_of_fast_prefill_reads_nothing(stock: Any, backend: str):
    module, _, name = backend.partition(":")
    underlying = getattr(importlib.import_module(f"vllm.v1.attention.backends.{module}"), name)
    like = builders.flash_attention_builder(spec_tokens=3)
    made = utils().create_fast_prefill_custom_backend("FastPrefill_", underlying).get_builder_cls()
    builder = made(like.kv_cache_spec, like.layer_names, like.vllm_config, like.device)
    given = metadata(*BATCHES["drafts and a prefill"])
    with sync_policy("error"), on_device(given, "logits_indices_padded") as reads:
        built = builder.build(0, given)
    assert dict(reads.now) == {}
    assert built.query_start_loc.tolist() == [0, 4, 8, 9]
    assert built.logits_indices_padded is given.logits_indices_padded


def test_counts_that_nobody_noted_are_fetched_by_one_counted_wait(stock: Any):
    given = metadata(*BATCHES["fewer drafts"])
    noted = given.logits_indices_padded
    for strange in (noted[:], noted.clone()):
        given.logits_indices_padded = strange
        reset_sync_report()
        made = cut(given)
        assert (sync_report().count, sync_report().fallbacks) == (1, {"KV-sharing fast prefill": 1})
        assert made.query_start_loc_cpu.tolist() == made.query_start_loc.tolist() == [0, 4, 5, 8, 9]
        assert made.max_query_len == 4
        with sync_policy("error"), pytest.raises(HostSyncError, match="a blocking host read of query_start_loc at"):
            cut(given)


def test_counts_of_another_batch_are_not_used(stock: Any):
    given = metadata(*BATCHES["fewer drafts"])
    other = metadata(*BATCHES["prefills"])
    given.logits_indices_padded.tokens_per_request = other.logits_indices_padded.tokens_per_request
    reset_sync_report()
    made = cut(given)
    assert sync_report().fallbacks == {"KV-sharing fast prefill": 1}
    assert made.query_start_loc_cpu.tolist() == [0, 4, 5, 8, 9]


def test_a_batch_of_one_token_each_stays_as_it_is(stock: Any):
    given = builders.common_metadata([1, 1], [33, 17])
    assert cut(given) is given


def test_the_v2_runner_notes_the_counts(stock: Any, release: str):
    attn_utils = importlib.import_module("vllm.v1.worker.gpu.attn_utils")
    if not hasattr(attn_utils, "FastPrefillHelper"):
        pytest.skip(f"the V2 runner of vLLM {release} has no fast prefill")
    manager = types.SimpleNamespace(
        device="cpu", dispatch=lambda **kwargs: types.SimpleNamespace(num_tokens=PADDED, cg_mode=None)
    )
    helper = attn_utils.FastPrefillHelper(manager, 100)
    assert "cu_num_logits_np" in inspect.signature(helper.prepare).parameters
    query, exact, drafts = BATCHES["fewer drafts"]
    given = metadata(query, exact, drafts)
    indices = given.logits_indices_padded[: given.num_logits_indices].clone()
    ends = np.concatenate([[0], np.cumsum(np.array(drafts) + 1)])
    batch = types.SimpleNamespace(cg_mode=None, num_ubatches=1)
    prepared = helper.prepare(indices, len(query), ends, True, batch)
    given.logits_indices_padded = prepared.logits_indices_padded
    with sync_policy("error"):
        made = cut(given)
    assert made.query_start_loc_cpu.tolist() == made.query_start_loc.tolist() == [0, 4, 5, 8, 9]
    assert helper.prepare(indices, len(query), ends, False, batch) is None
