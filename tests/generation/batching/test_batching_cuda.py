"""Continuous batching on a GPU: the streams, events and graphs that `LateStreams` stands for, and drafts."""

import contextlib
import copy
import dataclasses
import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import transformers
from generating import batcher_of
from small_batchers import DRAFTS

from vllm_async_spec.generation import ContinuousBatcher
from vllm_async_spec.generation.batching import Request
from vllm_async_spec.generation.batching.streams import CudaStreams, Work
from vllm_async_spec.streams import Arrival, refuse_waits

pytestmark = pytest.mark.gpu

VOCABULARY = 64
EOS = [2, 5, 11]
PROMPTS = [3, 1, 40, 9, 17, 2, 65, 5, 33, 16]
ATTENTIONS = ["TORCH_REFERENCE", "FLASHINFER_TRTLLM"]


def make_model(attention: str) -> Any:
    """Random weights, large enough that sequences differ; bfloat16 for kernels that take nothing wider."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        initializer_range=0.3,
    )
    dtype = torch.float32 if attention == "TORCH_REFERENCE" else torch.bfloat16
    model = transformers.LlamaForCausalLM(config).eval().to("cuda", dtype)
    model.generation_config = transformers.GenerationConfig(pad_token_id=0)
    return model


@pytest.fixture(scope="module", params=ATTENTIONS)
def subject(request: pytest.FixtureRequest) -> tuple[Any, str]:
    if request.param == "FLASHINFER_TRTLLM":
        pytest.importorskip("flashinfer", reason="flashinfer-python is not installed")
        capability = torch.cuda.get_device_capability()
        if capability[0] not in (9, 10, 12):
            pytest.skip(f"FlashInfer has no such kernel for compute capability {capability[0]}.{capability[1]}")
    return make_model(request.param), request.param


def prompts(seed: int = 0, lengths: Sequence[int] = PROMPTS) -> list[list[int]]:
    choose = random.Random(seed)
    return [[choose.randrange(VOCABULARY) for _ in range(length)] for length in lengths]


SETTINGS: dict[str, Any] = {
    "max_batch": 4,
    "max_length": 160,
    "max_prefills": 1,
    "decode_sizes": [4],
    "max_prefill_tokens": 32,
    "eos_token_id": EOS,
}
"""What shares a step changes no bit of any request's logits."""


def submit(batcher: ContinuousBatcher, index: int, prompt: list[int]) -> Request:
    return batcher.submit(prompt, max_new_tokens=40 + 3 * index, temperature=float(index % 2), seed=index)


def tokens(
    subject: tuple[Any, str],
    seed: int = 0,
    *,
    alone: bool = False,
    lengths: Sequence[int] = PROMPTS,
    **options: Any,
) -> list[list[int]]:
    model, attention = subject
    with batcher_of(model, attention=attention, **(SETTINGS | options)) as batcher:
        free = batcher.free_pages
        found = []
        for index, prompt in enumerate(prompts(seed, lengths)):
            found.append(submit(batcher, index, prompt))
            if alone:
                batcher.run()
        batcher.run()
        assert batcher.free_pages == free
        return [request.result() for request in found]


class DelayedLanes(CudaStreams):
    """Keeps each stream busy for a random while, a millisecond at most, before and after what is launched there."""

    def __init__(self, device: torch.device, slots: int, seed: int) -> None:
        super().__init__(device, slots)
        self._random = random.Random(seed)

    def _delayed(self, work: Work) -> Work:
        before, after = self._random.randrange(1_500_000), self._random.randrange(1_500_000)

        def delayed() -> None:
            torch.cuda._sleep(before)
            work()
            torch.cuda._sleep(after)

        return delayed

    def copy_in(self, slot: int, copy: Work) -> None:
        super().copy_in(slot, self._delayed(copy))

    def compute(self, slot: int, work: Work) -> None:
        super().compute(slot, self._delayed(work))

    def copy_out(self, slot: int, copy: Work) -> Arrival:
        return super().copy_out(slot, self._delayed(copy))


@pytest.mark.parametrize("cuda_graphs", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_the_tokens_are_the_synchronous_ones_under_random_delays(
    seed: int, cuda_graphs: bool, subject: tuple[Any, str]
):
    expected = tokens(subject, seed, synchronous=True, cuda_graphs=cuda_graphs)
    assert len({len(each) for each in expected}) > 2
    for ahead in (1, 2):
        found = tokens(
            subject,
            seed,
            cuda_graphs=cuda_graphs,
            steps_ahead=ahead,
            open_streams=lambda device, slots: DelayedLanes(device, slots, seed),
        )
        assert found == expected


def drafted(subject: tuple[Any, str], seed: int, noise: float, **options: Any) -> tuple[list[list[int]], float]:
    model, attention = subject
    generator = torch.Generator("cuda").manual_seed(1)
    drafter = copy.deepcopy(model)
    with torch.no_grad():
        for weights in drafter.parameters():
            weights += (
                noise * torch.randn(weights.shape, generator=generator, device="cuda").to(weights) * weights.std()
            )
    options = {"draft_model": drafter, "draft_tokens": DRAFTS} | options
    with batcher_of(model, attention=attention, **(SETTINGS | options)) as batcher:
        free = batcher.free_pages
        found = [batcher.submit(prompt, max_new_tokens=40) for prompt in prompts(seed)]
        batcher.run()
        assert batcher.free_pages == free
        return [request.result() for request in found], batcher.accepted


@pytest.mark.parametrize("cuda_graphs", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_with_drafts_the_tokens_are_the_synchronous_ones_under_random_delays(
    seed: int, cuda_graphs: bool, subject: tuple[Any, str]
):
    expected, accepted = drafted(subject, seed, 0.02, synchronous=True, cuda_graphs=cuda_graphs)
    assert len({len(each) for each in expected}) > 2
    assert 1 < accepted < 1 + DRAFTS
    for ahead in (1, 2):
        found, accepted_too = drafted(
            subject,
            seed,
            0.02,
            cuda_graphs=cuda_graphs,
            steps_ahead=ahead,
            open_streams=lambda device, slots: DelayedLanes(device, slots, seed),
        )
        assert found == expected
        assert accepted_too == accepted


@pytest.mark.parametrize(("noise", "least", "most"), [(0.0, 2.5, 4.0), (5.0, 1.0, 1.5)])
def test_with_drafts_the_tokens_are_those_without(noise: float, least: float, most: float):
    """In float32, where one token or four in a call leave the largest logit where it is."""
    reference = (make_model("TORCH_REFERENCE"), "TORCH_REFERENCE")
    expected, _ = drafted(reference, 0, noise, draft_model=None, draft_tokens=None)
    found, accepted = drafted(reference, 0, noise)
    assert found == expected
    assert least < accepted <= most


def test_drafts_make_the_host_wait_for_nothing(subject: tuple[Any, str]):
    model, attention = subject
    options: dict[str, Any] = {"draft_model": copy.deepcopy(model), "draft_tokens": DRAFTS, "attention": attention}
    for cuda_graphs in (True, False):
        with batcher_of(model, cuda_graphs=cuda_graphs, **(SETTINGS | options)) as batcher:
            found = [batcher.submit(prompt, max_new_tokens=30) for prompt in prompts()]
            torch.cuda.synchronize()
            refuse_waits(batcher.run)
            assert all(request.result() for request in found)


class NoFence:
    """An event that nobody waits for."""

    def wait(self, stream: torch.cuda.Stream) -> None:
        """Let the stream go on."""

    def record(self, stream: torch.cuda.Stream) -> None:
        """Mark nothing."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Let the host go on."""


class UnfencedLanes(DelayedLanes):
    def __init__(self, device: torch.device, slots: int, fence: str) -> None:
        super().__init__(device, slots, seed=0)
        changes: Any = {fence: NoFence()}
        self._events = [dataclasses.replace(events, **changes) for events in self._events]


@pytest.mark.parametrize("fence", ["copied_in", "computed", "copied_out"])
def test_without_one_of_the_fences_the_tokens_are_others(fence: str, subject: tuple[Any, str]):
    if subject[1] != "TORCH_REFERENCE":
        pytest.skip("a kernel given lengths that don't fit its plan may read anywhere")
    # All of one length, so that what is read too early is always of a step of the same sizes.
    lengths = [16] * 8
    expected = tokens(subject, synchronous=True, lengths=lengths)
    found = tokens(subject, lengths=lengths, open_streams=lambda device, slots: UnfencedLanes(device, slots, fence))
    assert found != expected


def test_graphs_change_no_token(subject: tuple[Any, str]):
    assert tokens(subject, cuda_graphs=True) == tokens(subject, cuda_graphs=False)


def test_compiled_decodes_give_the_synchronous_tokens(subject: tuple[Any, str]):
    expected = tokens(subject, synchronous=True, torch_compile=True)
    found = tokens(subject, torch_compile=True, open_streams=lambda device, slots: DelayedLanes(device, slots, seed=0))
    assert found == expected
    if subject[1] == "TORCH_REFERENCE":
        assert found == tokens(subject), "in float32 no rounding decides"


def test_other_company_changes_no_token(subject: tuple[Any, str]):
    assert tokens(subject, alone=True) == tokens(subject)


def test_the_tokens_are_those_of_generate():
    model = make_model("TORCH_REFERENCE")
    expected = []
    for prompt in prompts():
        ids = torch.tensor([prompt], device="cuda")
        mask = torch.ones_like(ids)
        made = model.generate(ids, attention_mask=mask, max_new_tokens=40, do_sample=False, eos_token_id=EOS)
        expected.append(made[0, len(prompt) :].tolist())
    with batcher_of(model, max_batch=4, max_length=160, eos_token_id=EOS, attention="TORCH_REFERENCE") as batcher:
        found = [batcher.submit(prompt, max_new_tokens=40) for prompt in prompts()]
        batcher.run()
    assert [request.result() for request in found] == expected


def test_no_step_makes_the_host_wait_for_the_device(subject: tuple[Any, str]):
    """PyTorch itself refuses a copy that blocks. The wait for the event of the step before is not one."""
    model, attention = subject
    with batcher_of(model, max_batch=4, max_length=160, eos_token_id=EOS, attention=attention) as batcher:
        found = [batcher.submit(prompt, max_new_tokens=30, temperature=0.5) for prompt in prompts()]
        torch.cuda.synchronize()
        refuse_waits(batcher.run)
        assert all(request.result() for request in found)


def test_a_step_that_finds_no_memory_fails_one_request(subject: tuple[Any, str]):
    model, attention = subject
    expected = tokens(subject)
    with batcher_of(model, attention=attention, **SETTINGS) as batcher:
        found = [submit(batcher, index, prompt) for index, prompt in enumerate(prompts())]
        with failing_prompt(model, call=3):
            batcher.run()
    failed = [request for request in found if request.error is not None]
    assert len(failed) == 1
    assert "memory is too small" in str(failed[0].error)
    assert all(request.result() == each for request, each in zip(found, expected, strict=True) if request.error is None)


@contextlib.contextmanager
def failing_prompt(model: Any, call: int) -> Iterator[None]:
    calls = itertools.count(1)

    def ask(*_: Any) -> None:
        if next(calls) == call:
            torch.empty(1 << 50, dtype=torch.uint8, device="cuda")

    handle = model.model.layers[1].register_forward_pre_hook(ask)
    yield
    handle.remove()
