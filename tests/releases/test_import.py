"""What the tests of this folder build on: the release imports, configures itself and builds metadata, without a GPU."""

import dataclasses
import importlib.metadata
from pathlib import Path

import pytest
import torch
from packaging.version import Version

from vllm_async_spec.compat import builders
from vllm_async_spec.compat.fetch import TESTED
from vllm_async_spec.compat.stubs import STUBS
from vllm_async_spec.compat.vllm_source import VllmSourceError, load_vllm

DECODE = ([1, 1, 1], [7, 33, 100])
SPEC = ([4, 4, 4], [10, 36, 103])
MIXED = ([1, 5, 40], [18, 21, 40])
BATCHES = pytest.mark.parametrize("batch", [DECODE, SPEC, MIXED], ids=["decode", "spec", "mixed"])


def test_it_is_the_release(release, vllm_source):
    import vllm

    assert Path(vllm.__file__).is_relative_to(vllm_source)
    assert vllm.__version__ == release
    assert importlib.metadata.version("vllm") == release


def test_a_second_release_is_refused(vllm_source):
    with pytest.raises(VllmSourceError, match="has already loaded a vLLM"):
        load_vllm(vllm_source)


def test_triton_kernels_are_real():
    from vllm.triton_utils import HAS_TRITON

    assert HAS_TRITON


def test_the_platform_is_one_hopper():
    from vllm.platforms import current_platform

    assert current_platform.is_cuda()
    assert current_platform.get_device_capability() == (9, 0)
    assert not current_platform.is_pin_memory_available()  # the torch of this machine has none


def test_imports():
    from vllm.plugins import load_general_plugins
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    assert callable(GPUModelRunner)
    assert callable(load_general_plugins)


@BATCHES
@pytest.mark.parametrize("host", [False, True], ids=["device", "host"])
def test_common_metadata(batch, host, make_common_metadata):
    query_lens, seq_lens = batch
    metadata = make_common_metadata(query_lens, seq_lens, host=host)
    fields = {field.name: field for field in dataclasses.fields(metadata)}
    assert metadata.query_start_loc.diff().tolist() == query_lens
    assert metadata.seq_lens.tolist() == seq_lens
    assert len(set(metadata.slot_mapping.tolist())) == metadata.num_actual_tokens == sum(query_lens)
    for name in fields.keys() & {"seq_lens_cpu", "_seq_lens_cpu"}:
        copy = getattr(metadata, name)
        assert copy.tolist() == seq_lens if host else copy is None
    if "seq_lens_cpu" in fields:  # 0.12: the reason for supplying it lazily
        assert fields["seq_lens_cpu"].default is dataclasses.MISSING


def test_micro_batches(make_common_metadata):
    split = builders.ubatch_function("split_attn_metadata")
    assert callable(builders.ubatch_function("_make_metadata_with_slice"))
    slices = builders.ubatch_function("UBatchSlice")
    halves = [slices(slice(0, 2), slice(0, 2)), slices(slice(2, 3), slice(2, 3))]
    parts = split(halves, make_common_metadata(*DECODE, host=True))
    assert [part.seq_lens.tolist() for part in parts] == [[7, 33], [100]]


@BATCHES
def test_flash_attention_builds(batch, loaded, make_common_metadata):
    query_lens, seq_lens = batch
    builder = builders.flash_attention_builder(spec_tokens=3)
    common = make_common_metadata(query_lens, seq_lens)
    loaded.calls.clear()
    built = builder.build(common_prefix_len=0, common_attn_metadata=common)
    assert (built.max_query_len, built.max_seq_len) == (max(query_lens), max(seq_lens))
    for name in ("query_start_loc", "seq_lens", "slot_mapping"):
        assert torch.equal(getattr(built, name), getattr(common, name))
    assert torch.equal(built.block_table, common.block_table_tensor)
    assert built.scheduler_metadata is not None
    (call,) = loaded.calls
    assert call.name == "get_scheduler_metadata"
    assert call.arguments["cache_seqlens"].data_ptr() == common.seq_lens.data_ptr()
    assert call.arguments["cu_seqlens_q"].data_ptr() == common.query_start_loc.data_ptr()
    assert call.arguments["max_seqlen_k"] == max(seq_lens)


def test_a_llama_has_the_shape_and_the_engine_the_arguments_that_were_asked_for():
    shape = {"num_heads": 6, "num_kv_heads": 3, "head_size": 128, "max_model_len": 512}
    config = builders.llama_config({"block_size": 32, "max_num_seqs": 5}, **shape)
    model = config.model_config
    heads = [kind(config.parallel_config) for kind in (model.get_num_attention_heads, model.get_num_kv_heads)]
    assert (heads, model.get_head_size(), model.max_model_len) == ([6, 3], 128, 512)
    assert (config.cache_config.block_size, config.scheduler_config.max_num_seqs) == (32, 5)


def test_the_stub_table_is_what_was_used(release, loaded, tiny_model_dir):
    import vllm.v1.worker.gpu_model_runner  # noqa: F401

    if release not in TESTED and Version(release) < Version(TESTED[-1]):
        pytest.skip("the table lists the releases under test, and what newer ones need")
    builders.engine_config(tiny_model_dir)
    builders.flash_attention_builder().build(0, builders.common_metadata(*DECODE))
    used = {stub.name for stub in loaded.stubbed if not stub.to_build}
    assert used == {stub.name for stub in STUBS if stub.is_for(release) and not stub.to_build}
