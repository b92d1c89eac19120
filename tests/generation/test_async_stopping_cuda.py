"""Asynchronous stopping on a GPU: the stream, the pinned buffers and the events that `LateChannel` stands for."""

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import pytest
import tiny_models
import torch
import transformers

from vllm_async_spec import generation
from vllm_async_spec.generation.stopping_criteria import AsyncStoppingCriteriaList
from vllm_async_spec.streams import waits_refused

pytestmark = pytest.mark.gpu


class Delays(transformers.StoppingCriteria):
    """Stops nothing; keeps the stream that it runs on busy for a random while, a millisecond at most."""

    def __init__(self, seed: int):
        self.random = random.Random(seed)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        torch.cuda._sleep(self.random.randrange(1_500_000))
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


class DelaysMain(transformers.LogitsProcessor):
    """The same for the stream that generates."""

    def __init__(self, seed: int):
        self.random = random.Random(seed)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        torch.cuda._sleep(self.random.randrange(1_500_000))
        return scores


@contextlib.contextmanager
def on_gpu(kind: str) -> Iterator[Any]:
    model = tiny_models.model(kind).to("cuda")
    try:
        yield model
    finally:
        model.to("cpu")


def prompts(lengths: list[int], seed: int = 0) -> dict[str, torch.Tensor]:
    return {name: each.cuda() for name, each in tiny_models.prompts(lengths, "left", seed).items()}


def delayed(model: Any, seed: int, *criteria: Any, **given: Any) -> tuple[Any, torch.Tensor]:
    """Generate from a seed while streams are busy at random: the output, and the generator's state afterwards."""
    torch.manual_seed(seed)
    output = model.generate(
        **given,
        stopping_criteria=transformers.StoppingCriteriaList(criteria),
        logits_processor=transformers.LogitsProcessorList([DelaysMain(seed)]),
    )
    return output, torch.cuda.get_rng_state()


WHOLE = {"return_dict_in_generate": True, "output_scores": True}


def assert_alike(expected: Any, output: Any) -> None:
    assert torch.equal(expected.sequences, output.sequences)
    assert len(expected.scores) == len(output.scores)
    assert int(expected.past_key_values.get_seq_length()) == int(output.past_key_values.get_seq_length())


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_the_same_tokens_under_random_delays(cache: str, do_sample: bool, seed: int):
    # No compilation: a graph captured under random delays says nothing more than the loop does.
    settings = {"max_new_tokens": 30, "do_sample": do_sample, "eos_token_id": [2, 5], "disable_compile": True}
    settings |= {"cache_implementation": cache, **WHOLE, **prompts([3, 1, 4, 2], seed)}
    with on_gpu("llama") as model:
        (expected, state), (output, state_after) = (
            delayed(model, seed, Delays(seed), **settings, **way)
            for way in ({}, {"custom_generate": generation.generate, "max_in_flight": 1 + seed % 3})
        )
    assert_alike(expected, output)
    assert torch.equal(state, state_after)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("poll_every", [1, 3])
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("ends", [[2], [2, 5]])
def test_ends_of_sequence_alone_under_random_delays(ends: list[int], batch: int, poll_every: int, seed: int):
    settings = {"max_new_tokens": 40, "do_sample": True, "eos_token_id": ends, **prompts([3, 1, 4, 2][:batch], seed)}
    late = {"custom_generate": generation.generate, "poll_every": poll_every, "max_in_flight": 1 + seed % 3}
    with on_gpu("llama") as model:
        (expected, state), (output, state_after) = (delayed(model, seed, **settings, **way) for way in ({}, late))
    assert torch.equal(expected, output)
    assert torch.equal(state, state_after)


def test_no_step_makes_the_host_wait_for_the_device():
    eos = transformers.generation.EosTokenCriteria(torch.tensor([7], device="cuda"))
    criteria = AsyncStoppingCriteriaList(
        [eos, transformers.MaxLengthCriteria(60)], max_in_flight=2, starts_unfinished=True
    )
    ids = torch.zeros(4, 3, dtype=torch.long, device="cuda")
    tokens, end = torch.ones(4, dtype=torch.long, device="cuda"), torch.full((4,), 7, device="cuda")
    # The first call opens the channel, which may wait.
    unfinished = torch.ones(4, dtype=torch.long, device="cuda") & ~criteria(ids, None)
    torch.cuda.synchronize()
    with waits_refused():
        while not bool(unfinished.max() == 0):
            chosen = end if ids.shape[1] >= 40 else tokens
            ids = torch.cat([ids, (chosen * unfinished + 0 * (1 - unfinished))[:, None]], dim=-1)
            unfinished = unfinished & ~criteria(ids, None)
    length = ids.shape[1] - criteria.finish()
    assert length == 41
    assert ids[:, length - 1].tolist() == [7] * 4


class RefusesSyncs(transformers.LogitsProcessor):
    """From the third step on PyTorch refuses whatever waits for the device, until the last but two."""

    def __init__(self, first: int, last: int):
        self.first, self.last = first, last
        self.seen = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        length = input_ids.shape[1]
        self.seen += self.first <= length < self.last
        torch.cuda.set_sync_debug_mode("error" if self.first <= length < self.last else "default")
        return scores


def check_no_step_waits(model: Any, first: int, *, padded: bool, **settings: Any) -> None:
    """The tokens are stock's, and from that length on no step waits, which stock's does and is refused for."""
    settings |= {"max_new_tokens": 20, "eos_token_id": tiny_models.VOCABULARY}
    settings |= prompts([4, 2] if padded else [4, 4])

    def run(*processors: RefusesSyncs, **way: Any) -> torch.Tensor:
        torch.manual_seed(0)
        try:
            return model.generate(**settings, **way, logits_processor=transformers.LogitsProcessorList(processors))
        finally:
            torch.cuda.set_sync_debug_mode("default")

    expected = run()
    with pytest.raises(RuntimeError, match="synchronizing CUDA operation"):
        run(RefusesSyncs(first, 22))
    refusing = RefusesSyncs(first, 22)
    assert torch.equal(run(refusing, custom_generate=generation.generate), expected)
    assert refusing.seen == 22 - first


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("do_sample", [False, True])
def test_no_step_of_generate_waits_with_sdpa_and_a_dynamic_cache(kind: str, padded: bool, do_sample: bool):
    with on_gpu(kind) as model:
        attention = model.config._attn_implementation
        model.set_attn_implementation("sdpa")
        try:
            check_no_step_waits(model, 6, padded=padded, do_sample=do_sample)
        finally:
            model.set_attn_implementation(attention)


@pytest.fixture
def compiled_model(request: pytest.FixtureRequest) -> Any:
    """A model of its own, because transformers keeps what it compiles there."""
    torch._dynamo.reset()
    model = tiny_models.model.__wrapped__(request.param).to("cuda")
    model.set_attn_implementation("sdpa")
    return model


@pytest.mark.parametrize("compiled_model", ["llama", "gpt2"], indirect=True)
@pytest.mark.parametrize("do_sample", [False, True])
def test_the_same_tokens_where_transformers_compiles_the_step(compiled_model: Any, do_sample: bool):
    """Steps are CUDA graphs, whose outputs the next one overwrites; surplus steps are undone in the cache."""
    settings = {"max_new_tokens": 30, "do_sample": do_sample, "eos_token_id": [2, 5], **WHOLE}
    settings |= {"cache_implementation": "static", **prompts([3, 1, 4, 2])}

    def run(seed: int, **way: Any) -> tuple[Any, torch.Tensor]:
        return delayed(compiled_model, seed, Delays(seed), **settings, **way)

    run(0)  # compiles
    for seed in range(5):
        (expected, state), (output, state_after) = run(seed), run(seed, custom_generate=generation.generate)
        assert_alike(expected, output)
        for one, other in zip(expected.scores, output.scores, strict=True):
            assert torch.equal(one, other)
        assert torch.equal(state, state_after)
    assert hasattr(compiled_model, "_compiled_call"), "transformers compiled nothing"


@pytest.mark.parametrize("compiled_model", ["llama", "gpt2"], indirect=True)
@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("do_sample", [False, True])
def test_no_step_waits_where_transformers_compiles_the_step(compiled_model: Any, padded: bool, do_sample: bool):
    check_no_step_waits(compiled_model, 8, padded=padded, do_sample=do_sample, cache_implementation="static")
    assert hasattr(compiled_model, "_compiled_call"), "transformers compiled nothing"
