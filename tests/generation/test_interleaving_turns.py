"""Interleaved generations of several threads on one device, which share its two streams; see `CudaSlots`."""

import contextlib
import threading
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import pytest
import tiny_models
import torch
from generating import may_wait
from simulated_streams import Stream, device_of, simulated
from test_interleaving_streams import PROMPTS, SETTINGS

from vllm_async_spec import generation
from vllm_async_spec.generation.decode import Decode
from vllm_async_spec.generation.flag_channel import CudaFlagChannel
from vllm_async_spec.generation.slots import CudaSlots

pytestmark = [
    may_wait,
    pytest.mark.timeout(120),
]
CPU = torch.device("cpu")
INTERLEAVED = {"custom_generate": generation.generate, "interleaved": True, "open_channel": CudaFlagChannel}
MOMENT, LONG = 0.5, 60.0
"""Seconds: what a thread that must wait is given to go wrong; what one that may go on takes at most."""


class OutOfTurn(Exception):
    """A step was launched in the middle of another thread's generation."""


def generate(kind: str, **way: Any) -> torch.Tensor:
    inputs = tiny_models.prompts([3], "left", PROMPTS)
    made: torch.Tensor = tiny_models.model(kind).generate(**inputs, **SETTINGS, **way)
    return made


def generate_in_two_threads(patch: pytest.MonkeyPatch, given: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Llama's tokens and GPT-2's, whose generation begins in another thread in the middle of Llama's.

    Raises:
        OutOfTurn: and launches a step there.
    """
    launch, here, threads = Decode.launch, threading.get_ident(), ThreadPoolExecutor(1)
    others: list[Future[torch.Tensor]] = []
    in_the_middle = threading.Event()

    def watched(self: Decode, slot: int, length: int) -> Any:
        if threading.get_ident() != here:
            if in_the_middle.is_set():
                raise OutOfTurn
        elif length > 6 and not others:
            in_the_middle.set()
            others.append(threads.submit(generate, "gpt2", **INTERLEAVED))
            wait(others, given)
            in_the_middle.clear()
        return launch(self, slot, length)

    patch.setattr(Decode, "launch", watched)
    return generate("llama", **INTERLEAVED), others[0].result(60)


def test_a_generation_of_another_thread_waits_for_its_turn():
    expected = [generate(kind) for kind in ("llama", "gpt2")]
    with simulated(0) as patch:
        found = generate_in_two_threads(patch, MOMENT)
    assert all(torch.equal(*each) for each in zip(expected, found, strict=True))


def test_without_turns_it_would_not():
    with simulated(0) as patch:
        patch.setattr(CudaSlots, "turn", contextlib.nullcontext)
        with pytest.raises(OutOfTurn):
            generate_in_two_threads(patch, LONG)


def waits(work: Any, held: CudaSlots) -> bool:
    with ThreadPoolExecutor(1) as threads:
        with held.turn():
            done = threads.submit(work)
            wait([done], MOMENT)
            waited = not done.done()
        done.result(60)
    return waited


def take_turn(slots: CudaSlots) -> None:
    with slots.turn():
        pass


def test_a_turn_is_of_a_device_and_of_a_thread():
    with simulated(0):
        slots = CudaSlots(CPU)
        assert waits(lambda: take_turn(CudaSlots(CPU)), slots)
        assert not waits(lambda: take_turn(CudaSlots(torch.device("cuda", 1))), slots)
        with slots.turn():
            take_turn(CudaSlots(CPU))  # a generation inside another


def test_what_is_kept_is_released_in_turn():
    """It waits for the whole device, which would break another thread's capture."""
    model = tiny_models.model("llama")
    with simulated(0):
        generate("llama", **INTERLEAVED)
        assert waits(lambda: generation.release(model), CudaSlots(CPU))
        with pytest.raises(LookupError):
            generation.memory_report(model)


def old_before_new(seed: int, *, taken: bool) -> bool:
    """Whether the last work of both slots is done before that of the next caller, who has a stream of its own."""
    order: list[str] = []
    with simulated(seed) as patch:
        slots, device = CudaSlots(CPU), device_of(None)
        for stream in slots.streams:
            stream.launch(lambda: order.append("old"))
        if taken:
            patch.setattr(CudaSlots, "end", lambda _: None)
        device.current = Stream(device)
        with slots.turn():
            device.current.launch(lambda: order.append("new"))
        while device.run_one():
            pass
    return order == ["old", "old", "new"]


def test_a_turn_is_behind_the_steps_of_the_one_before():
    assert all(old_before_new(seed, taken=False) for seed in range(12))
    assert not all(old_before_new(seed, taken=True) for seed in range(12)), "the control"
