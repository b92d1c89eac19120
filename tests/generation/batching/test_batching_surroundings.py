"""What surrounds a batcher: modes of PyTorch, the model's own configurations, an idle event loop, and a signal."""

import asyncio
import copy
import gc
import signal
import threading
from typing import Any

import numpy as np
import pytest
import tiny_models
import torch
from small_batchers import DRAFTS, EOS, PROMPTS, collect, generated, make

from vllm_async_spec.generation import BatcherConfig, ContinuousBatcher
from vllm_async_spec.generation.batching import BatcherError, ModelError, RequestError

pytestmark = pytest.mark.timeout(120)

CONFIG = BatcherConfig(max_batch=3, max_length=64, eos_token_id=EOS)


@pytest.fixture
def model() -> Any:
    return copy.deepcopy(tiny_models.model("llama"))


async def served(batcher: ContinuousBatcher, index: int) -> list[int]:
    return await collect(batcher.stream(PROMPTS[index], max_new_tokens=20))


@pytest.mark.parametrize("made_inside", [True, False])
@pytest.mark.parametrize("streamed", [True, False])
def test_it_may_be_made_and_used_in_and_outside_inference_mode(model: Any, made_inside: bool, streamed: bool):
    with torch.inference_mode(made_inside):
        batcher = ContinuousBatcher(model, config=CONFIG)
    with torch.inference_mode(not made_inside), batcher:
        if streamed:
            assert asyncio.run(served(batcher, 0)) == generated("llama", PROMPTS[0], 20)
        else:
            request = batcher.submit(PROMPTS[0], max_new_tokens=20)
            batcher.run()
            assert request.result() == generated("llama", PROMPTS[0], 20)


@pytest.mark.parametrize("drafts", [None, DRAFTS])
def test_the_default_device_of_pytorch_changes_nothing(model: Any, drafts: int | None):
    drafter = None if drafts is None else copy.deepcopy(model)
    torch.set_default_device("meta")
    try:
        with ContinuousBatcher(model, config=CONFIG, draft_model=drafter) as batcher:
            request = batcher.submit(PROMPTS[0], max_new_tokens=20)
            batcher.run()
    finally:
        torch.set_default_device(None)
    assert request.result() == generated("llama", PROMPTS[0], 20)


def test_autocast_is_refused_and_harms_no_request(model: Any):
    autocast = torch.autocast("cpu", dtype=torch.bfloat16)
    said = r"torch.autocast is on for cpu; leave its block, or convert the model"
    with autocast, pytest.raises(BatcherError, match=said):
        ContinuousBatcher(model, config=CONFIG)
    with ContinuousBatcher(model, config=CONFIG) as batcher:
        request = batcher.submit(PROMPTS[0], max_new_tokens=20)
        with autocast:
            with pytest.raises(BatcherError, match=said):
                batcher.submit(PROMPTS[1])
            with pytest.raises(BatcherError, match=said):
                batcher.run()
        batcher.run()
        assert request.result() == generated("llama", PROMPTS[0], 20)


@pytest.mark.parametrize(
    ("name", "value"), [("repetition_penalty", 1.3), ("suppress_tokens", [3]), ("forced_eos_token_id", 0)]
)
def test_a_model_whose_generate_gives_other_tokens_is_refused(model: Any, name: str, value: object):
    setattr(model.generation_config, name, value)
    with pytest.raises(ModelError, match=f"generation_config has {name}=.*; set model.generation_config.{name} = None"):
        ContinuousBatcher(model, config=CONFIG)
    setattr(model.generation_config, name, None)
    ContinuousBatcher(model, config=CONFIG).close()


def test_a_configuration_that_two_models_share_is_told_from_a_model_in_use(model: Any):
    twin = type(model)(model.config).eval()
    with pytest.raises(ModelError, match="the configuration of this LlamaForCausalLM is shared"):
        ContinuousBatcher(model, config=CONFIG, draft_model=twin)
    with ContinuousBatcher(model, config=CONFIG):
        with pytest.raises(ModelError, match="this LlamaForCausalLM belongs to a ContinuousBatcher; close that"):
            ContinuousBatcher(model, config=CONFIG)
        copied = copy.deepcopy(model)
    with pytest.raises(ModelError, match="or copied from one"):
        ContinuousBatcher(copied, config=CONFIG)
    copied.set_attn_implementation("sdpa")
    ContinuousBatcher(copied, config=CONFIG).close()


def test_a_batcher_that_is_dropped_gives_its_model_back(model: Any):
    before = model.config._attn_implementation
    batcher = ContinuousBatcher(model, config=CONFIG)
    assert model.config._attn_implementation != before
    del batcher
    gc.collect()
    assert model.config._attn_implementation == before
    ContinuousBatcher(model, config=CONFIG).close()


def test_an_event_loop_that_started_it_serves_also_what_comes_later():
    async def main(batcher: ContinuousBatcher) -> list[list[int]]:
        batcher.start()
        found = []
        for index in range(3):
            await asyncio.sleep(0.05)  # it is idle by now
            submit = batcher.submit if index else in_a_thread(batcher)
            found.append(await asyncio.wait_for(collect(aiter(submit(PROMPTS[index], max_new_tokens=20))), 30))
        return found

    def in_a_thread(batcher: ContinuousBatcher) -> Any:
        def submit(*arguments: Any, **options: Any) -> Any:
            made: list[Any] = []
            thread = threading.Thread(target=lambda: made.append(batcher.submit(*arguments, **options)))
            thread.start()
            thread.join()
            return made[0]

        return submit

    expected = [generated("llama", prompt, 20) for prompt in PROMPTS[:3]]
    with make() as batcher:
        for _ in range(2):  # the second time the first loop is closed
            assert asyncio.run(main(batcher)) == expected


def test_closing_it_ends_its_thread():
    def threads() -> set[threading.Thread]:
        return {each for each in threading.enumerate() if each.name.startswith("ContinuousBatcher")}

    before = threads()
    with make() as batcher:
        asyncio.run(served(batcher, 0))
        (mine,) = threads() - before
    mine.join(30)
    assert not mine.is_alive()
    with pytest.raises(BatcherError, match="the batcher is closed; make another"):
        asyncio.run(started(batcher))


async def started(batcher: ContinuousBatcher) -> None:
    batcher.start()


class InterruptedLock:
    """A lock that is interrupted just after it was taken, the first time."""

    def __init__(self, lock: Any) -> None:
        self._lock, self._armed = lock, True

    def acquire(self, blocking: bool = True) -> bool:
        found: bool = self._lock.acquire(blocking)
        if self._armed:
            self._armed = False
            signal.raise_signal(signal.SIGINT)
        return found

    def release(self) -> None:
        self._lock.release()


@pytest.mark.parametrize("first", ["run", "close"])
def test_an_interrupt_just_after_the_lock_was_taken_leaves_it_free(first: str):
    expected = generated("llama", PROMPTS[0], 20)
    batcher = make()
    request = batcher.submit(PROMPTS[0], max_new_tokens=20)
    batcher._stepping = InterruptedLock(batcher._stepping)  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        getattr(batcher, first)()
    if first == "run":
        batcher.run()
        assert request.result() == expected
    closing = threading.Thread(target=batcher.close, daemon=True)
    closing.start()
    closing.join(30)
    assert not closing.is_alive()
    assert request.finished


def test_numbers_of_numpy_are_numbers(model: Any):
    config = BatcherConfig(max_batch=np.int64(2), max_length=64, eos_token_id=np.int64(2), decode_sizes=iter([1, 2]))
    with ContinuousBatcher(model, config=config) as batcher:
        request = batcher.submit(PROMPTS[0], max_new_tokens=20)
        batcher.run()
    assert request.result() == generated("llama", PROMPTS[0], 20, [2])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tokenizer": CONFIG}, "the BatcherConfig was given as the tokenizer; give it by name, as config=..."),
        ({"config": {"max_batch": 2}}, r"config is \{'max_batch': 2\}; it must be a BatcherConfig"),
        (
            {"config": BatcherConfig(max_batch=2, max_length=64, eos_token_id=[-5])},
            r"eos_token_id has -5; the model's vocabulary is 0 to \d+, and \[\] ends no sequence",
        ),
    ],
)
def test_wrong_arguments_are_named(model: Any, arguments: dict[str, Any], message: str):
    with pytest.raises((TypeError, ValueError), match=message):
        ContinuousBatcher(model, **arguments)


def test_a_compiled_model_is_refused(model: Any):
    with pytest.raises(ModelError, match=r"the model is compiled by torch.compile; give the model that was compiled"):
        ContinuousBatcher(torch.compile(model, backend="eager"), config=CONFIG)


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        (b"ab", {}, "the prompt is b'ab'; give a list of token ids, or text"),
        ({1: 2}, {}, r"the prompt is \{1: 2\}; give a list"),
        (torch.tensor([True]), {}, "the prompt is a tensor of bool, such as a mask; give the token ids"),
        ([1], {"temperature": float("inf")}, "temperature is inf; it must be 0, which is greedy, or from 0.01 to"),
        ([1], {"temperature": 1e39}, r"temperature is 1e\+39; it must be 0"),
    ],
)
def test_wrong_requests_are_named(prompt: Any, options: dict[str, Any], message: str):
    with make() as batcher, pytest.raises(RequestError, match=message):
        batcher.submit(prompt, **options)
