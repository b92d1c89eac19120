"""Two builders of 0.18.1 that wait only with the numbers of real models, tried with those of the tiny model."""

from typing import Any

import pytest

from vllm_async_spec.compat.backends import backend_subject
from vllm_async_spec.compat.cases import CASES
from vllm_async_spec.compat.check import check
from vllm_async_spec.compat.model_shapes import TINY
from vllm_async_spec.compat.simulated_device import SimulatedDevice
from vllm_async_spec.compat.vllm_source import loaded_source

WAITING = {
    "FLASHMLA_SPARSE_FP8": (
        "vllm/v1/attention/backends/mla/flashmla_sparse.py:367 in "
        "FlashMLASparseMetadataBuilder._build_fp8_separate_prefill_decode, called at "
        "vllm/v1/attention/backends/mla/flashmla_sparse.py:512: copy to host (cpu): "
        "common_attn_metadata.seq_lens.cpu()"
    ),
    "FLASH_ATTN_MLA": (
        "vllm/model_executor/layers/attention/mla_attention.py:1735 in MLACommonMetadataBuilder.build: "
        "copy to host (cpu): common_attn_metadata.compute_num_computed_tokens().cpu()"
    ),
}


@pytest.fixture
def device() -> SimulatedDevice:
    device = SimulatedDevice()
    source: Any = loaded_source()
    source.on_kernel = device.kernel_did_not_run
    return device


@pytest.mark.parametrize("name", WAITING)
def test_a_builder_that_waits_with_real_models_only_is_not_shown_clean(
    name: str, device: SimulatedDevice, release: str
):
    if release != "0.18.1":
        pytest.skip(f"the lines are those of vLLM 0.18.1, not of {release}")
    found = check(backend_subject(name, device, TINY), device, cases=CASES)
    assert found.passed
    assert not found.shown_clean
    assert WAITING[name] in map(str, found.unreached)
