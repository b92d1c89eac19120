"""Top-k alone on a real vLLM release."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from undone import applied, module_of

from vllm_async_spec.audit.host_reads import CpuProbe
from vllm_async_spec.vllm_plugin.patches.top_k_bound import top_k_only

VOCABULARY = 64


@pytest.fixture(scope="module")
def sampler(release: str) -> Any:
    return module_of(release, "top-k-bound", "vllm.v1.sample.ops.topk_topp_sampler")


@pytest.fixture
def patched(sampler: Any) -> Iterator[None]:
    with applied("top-k-bound"):
        yield


def make_batch(*top_k: int) -> Any:
    """vLLM's own input batch, with a request for each k; 0 is none."""
    from vllm import SamplingParams
    from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch

    batch = InputBatch(
        max_num_reqs=8,
        max_model_len=32,
        max_num_batched_tokens=64,
        device=torch.device("cpu"),
        pin_memory=False,
        vocab_size=VOCABULARY,
        block_sizes=[16],
        kernel_block_sizes=[16],
    )
    for number, k in enumerate(top_k):
        batch.add_request(
            CachedRequestState(
                req_id=str(number),
                prompt_token_ids=[1, 2, 3],
                mm_features=[],
                sampling_params=SamplingParams(temperature=1.0, top_k=k),
                pooling_params=None,
                generator=None,
                block_ids=([0],),
                num_computed_tokens=0,
                output_token_ids=[],
            )
        )
    batch.refresh_metadata()
    return batch


def sample(sampler: Any, batch: Any) -> tuple[torch.Tensor, int]:
    rows = batch.num_reqs
    logits = torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(rows))
    probe, top_k = CpuProbe(), batch.sampling_metadata.top_k
    probe.mark(top_k, 0)
    with probe as reads:
        masked = sampler.apply_top_k_top_p(logits, top_k, None)
    return masked, reads.now.total()


@pytest.mark.parametrize("top_k", [(5,), (5, 0, 1), (0, 63, 7, 7)])
def test_the_same_logits_are_masked_and_nothing_is_asked_for(sampler, top_k):
    expected, reads = sample(sampler, make_batch(*top_k))
    assert reads == 1, "stock vLLM asks for the largest k, or this test sees nothing"
    with applied("top-k-bound"):
        masked, reads = sample(sampler, make_batch(*top_k))
    assert reads == 0
    assert torch.equal(masked, expected)
    assert masked.isfinite().sum(1).tolist() == [k or VOCABULARY for k in top_k]


@pytest.mark.usefixtures("patched")
def test_a_batch_that_is_as_it_was_keeps_its_largest_k(sampler):
    first = make_batch(40)
    other = make_batch(2)
    assert sample(sampler, first)[0].isfinite().sum() == 40
    del first
    assert sample(sampler, other)[0].isfinite().sum() == 2


@pytest.mark.usefixtures("patched")
def test_a_request_that_leaves_takes_its_k_along(sampler, monkeypatch):
    batch = make_batch(40, 3)
    batch.remove_request("0")
    batch.condense()
    batch.refresh_metadata()
    taken = []
    monkeypatch.setattr(torch.Tensor, "topk", lambda self, k, dim: (taken.append(k), torch.topk(self, k, dim))[1])
    assert sample(sampler, batch)[0].isfinite().sum() == 3
    assert taken == [3]


@pytest.mark.usefixtures("patched")
def test_vllms_warm_up_has_no_request(sampler):
    logits, k = torch.randn(4, VOCABULARY), torch.full((4,), VOCABULARY - 1)
    assert sampler.apply_top_k_top_p(logits, k, None).isfinite().sum(1).tolist() == [VOCABULARY - 1] * 4


@pytest.mark.usefixtures("sampler")
def test_ties_are_kept_as_vllm_keeps_them(sampler):
    logits = torch.randint(0, 4, (16, VOCABULARY), generator=torch.Generator().manual_seed(0)).float()
    k = torch.randint(1, VOCABULARY + 1, (16,), dtype=torch.int32, generator=torch.Generator().manual_seed(1))
    expected = sampler.apply_top_k_only(logits.clone(), k.clone())
    for bound in (VOCABULARY - 1, VOCABULARY):
        assert torch.equal(top_k_only(logits.clone(), k.clone(), bound), expected)
