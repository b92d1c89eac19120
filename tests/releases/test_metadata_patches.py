"""The metadata patches on a real vLLM release: its metadata behaves as ours does."""

import dataclasses

import pytest
import torch

from vllm_async_spec import HostSyncError, reset_sync_report, sync_policy, sync_report
from vllm_async_spec.attention import FlashAttentionAdapter, HostNeed
from vllm_async_spec.compat import builders

QUERY, SEQ = [1, 4, 7], [33, 100, 7]
COMPUTED = [32, 96, 0]


@pytest.fixture
def metadata(ledger):
    """What the runner builds, with no host lengths."""
    reset_sync_report()
    made = builders.common_metadata(QUERY, SEQ)
    made.seq_lens_cpu = made.num_computed_tokens_cpu = None
    if hasattr(made, "seq_lens_cpu_upper_bound"):
        made.seq_lens_cpu_upper_bound = made.seq_lens_cpu_upper_bound + 3
    return made


def test_unknown_lengths_are_copied_at_the_callers_line(metadata):
    assert metadata._seq_lens_cpu is None
    assert metadata.num_computed_tokens_cpu.tolist() == COMPUTED
    assert metadata.seq_lens_cpu.tolist() == SEQ
    assert {(site.what, site.count, site.site.file) for site in sync_report().sites} == {
        ("num_computed_tokens", 1, __file__),
        ("seq_lens", 1, __file__),
    }
    assert metadata.num_computed_tokens.tolist() == COMPUTED
    assert metadata.seq_len_upper_bound == metadata.max_seq_len
    with sync_policy("error"), pytest.raises(HostSyncError):
        builders.common_metadata(QUERY, SEQ).seq_lens_cpu  # noqa: B018


def test_unpadded_replace_and_micro_batches_never_sync(metadata):
    ubatch_slice = builders.ubatch_function("UBatchSlice")
    cut = builders.ubatch_function("_make_metadata_with_slice")
    with sync_policy("error"):
        unpadded = metadata.unpadded(5, 2)
        replaced = dataclasses.replace(metadata, max_query_len=9)
        parts = [
            cut(ubatch_slice(slice(0, 2), slice(0, 3)), metadata),
            cut(ubatch_slice(slice(1, 3), slice(3, 12)), metadata),
        ]
    assert replaced.seq_lens is metadata.seq_lens
    bound = getattr(metadata, "seq_lens_cpu_upper_bound", None)
    if bound is not None:
        assert unpadded.seq_lens_cpu_upper_bound.tolist() == bound[:2].tolist()
    assert unpadded.seq_lens_cpu.tolist() == SEQ[:2]
    assert unpadded.num_computed_tokens_cpu.tolist() == COMPUTED[:2]
    assert [part.seq_lens_cpu.tolist() for part in parts] == [[33, 98], [100, 7]]
    assert all(part.max_seq_len >= max(part.seq_lens.tolist()) for part in parts)


@pytest.mark.parametrize(
    ("query", "seq"), [([1, 1, 1], SEQ), ([4, 4, 4], [36, 100, 10]), (QUERY, SEQ)], ids=["decode", "spec", "mixed"]
)
def test_flash_attention_needs_device_lengths_only(ledger, loaded, query, seq):
    builder = builders.flash_attention_builder(spec_tokens=3)
    metadata = builders.common_metadata(query, seq)
    metadata.seq_lens_cpu = metadata.num_computed_tokens_cpu = None
    with sync_policy("error"):
        built = builder.build(common_prefix_len=0, common_attn_metadata=metadata)
        adapter = FlashAttentionAdapter()
        arguments = adapter.arguments(metadata)
    assert adapter.host_need is HostNeed.NONE
    assert torch.equal(arguments.cu_seqlens_q, built.query_start_loc)
    assert torch.equal(arguments.seqused_k, built.seq_lens)
    assert torch.equal(arguments.block_table, built.block_table)
    assert (arguments.max_seqlen_q, arguments.max_seqlen_k) == (built.max_query_len, built.max_seq_len)
    assert arguments.causal == built.causal
