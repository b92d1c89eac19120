"""What a step of transformers' loop reads of the device, as in the table of docs/generation.md."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import tiny_models
import torch
import transformers
from generating import EVERYTHING, RowsStopAt, assert_same, late, seeded
from late_device import LateArrival, LateChannel
from packaging.version import Version
from prepared_inputs import HAS_POSITIONS, attending, given_to_forward
from torch._C._functorch import get_unwrapped, is_batchedtensor
from torch.utils._pytree import tree_map_only

from vllm_async_spec.compat.simulated_device import SimulatedDevice
from vllm_async_spec.generation.reused_inputs import reused_inputs

READS_ALL_MASKS = Version(transformers.__version__) < Version("5.18")
EAGER_WAITS = Version(transformers.__version__) < Version("5.21")
POSITIONS, MASK, EAGER = "_cache_dependant_input_preparation", "_ignore_causal_mask_sdpa", "eager_mask"
STOP = "_has_unfinished_sequences" if HAS_POSITIONS else "StopCheck"


class Device(SimulatedDevice):
    """Sees through `vmap`, which makes masks in 4.57."""

    def holds(self, tensor: torch.Tensor) -> bool:
        return super().holds(_without_vmap(tensor))

    def mark(self, tensor: torch.Tensor, step: int) -> None:
        super().mark(_without_vmap(tensor), step)

    def step_of(self, values: Any) -> int | None:
        return super().step_of(tree_map_only(torch.Tensor, _without_vmap, values))

    def to_host(self, tensor: torch.Tensor) -> None:
        super().to_host(_without_vmap(tensor))


def _without_vmap(tensor: torch.Tensor) -> torch.Tensor:
    while is_batchedtensor(tensor):
        tensor = get_unwrapped(tensor)
    return tensor


class ChannelOf(LateChannel):
    device: Device

    def open(self, device: torch.device, width: int, in_flight: int) -> LateChannel:
        return self

    def send(self, flags: torch.Tensor) -> LateArrival:
        arrival = super().send(flags)
        self.device.to_host(arrival.flags)
        return arrival


def waits_in_a_step(kind: str, attention: str, cache: str, *, padded: bool, ours: bool, **kwargs: Any) -> Counter[str]:
    few, many = 4, 8
    counts = []
    for steps in (few, many):
        with attending(kind, attention) as model:
            device = Device(each_wait=True)
            for tensor in (*model.parameters(), *model.buffers()):
                device.place(tensor.data)
            prompts = tiny_models.prompts([4, 2] if padded else [4, 4])
            inputs = {name: device.place(each) for name, each in prompts.items()}
            channel = ChannelOf(1)
            channel.device = device
            way = late(channel) if ours else {}
            settings = {"max_new_tokens": steps, "eos_token_id": tiny_models.VOCABULARY, "cache_implementation": cache}
            with device.watching() as found:
                model.generate(**inputs, **settings, **kwargs, **way)
        counts.append(Counter(_where(wait) for wait in found))
    assert counts[0] <= counts[1]
    more = counts[1] - counts[0]
    assert all(count % (many - few) == 0 for count in more.values()), more
    return Counter({where: count // (many - few) for where, count in more.items()})


def _where(wait: Any) -> str:
    return next((name for name in (POSITIONS, MASK, STOP, EAGER) if name in wait.stack[0].function), str(wait))


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
def test_what_a_step_waits_for(kind: str, attention: str, cache: str, padded: bool):
    mask = attention == "sdpa" and cache == "dynamic" and (READS_ALL_MASKS or padded)
    eager = [EAGER] if attention == "eager" and EAGER_WAITS else []
    stock = Counter([STOP, *[POSITIONS] * HAS_POSITIONS, *[MASK] * mask, *eager])
    assert waits_in_a_step(kind, attention, cache, padded=padded, ours=False) == stock
    assert waits_in_a_step(kind, attention, cache, padded=padded, ours=True) == Counter(eager)


@pytest.mark.parametrize("kind", ["sliding", "hybrid"])
@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
def test_windows_wait_for_nothing(kind: str, padded: bool):
    assert waits_in_a_step(kind, "sdpa", "dynamic", padded=padded, ours=True, return_dict_in_generate=True) == Counter()


def test_inference_mode_waits_for_nothing():
    with torch.inference_mode():
        assert waits_in_a_step("llama", "sdpa", "dynamic", padded=True, ours=True) == Counter()


# A forward that transformers compiles


class Replays:
    """A backend of `torch.compile` whose graphs give their outputs the same memory each time, as CUDA graphs do."""

    def __init__(self) -> None:
        self.compiled = 0

    def __call__(self, graph: Any, example: Any, **options: Any) -> Any:
        self.compiled += 1
        kept: list[torch.Tensor] = []

        def replay(*inputs: Any) -> Any:
            found = graph(*inputs)
            if not kept:
                kept.extend(each.clone() for each in found)
            for place, each in zip(kept, found, strict=True):
                place.copy_(each)
            return tuple(kept)

        return replay

    def __deepcopy__(self, memo: Any) -> Replays:
        return self  # transformers hands a copy of the configuration on

    def config(self) -> Any:
        config = transformers.CompileConfig(backend=self, mode="default")
        config._compile_all_devices = True
        return config


@pytest.mark.parametrize("kind", ["llama", "gpt2", "sliding", "hybrid"])
@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
def test_a_step_whose_forward_transformers_compiles_waits_for_nothing(kind: str, padded: bool):
    """While memory passes for a device's PyTorch compiles nothing, so the forward is looked at too."""
    settings = {"attention": "sdpa", "cache": "static", "padded": padded, "compile_config": Replays().config()}
    assert waits_in_a_step(kind, ours=False, **settings) == Counter([STOP, *[POSITIONS] * HAS_POSITIONS])
    assert waits_in_a_step(kind, ours=True, **settings) == Counter()


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
def test_a_forward_that_transformers_compiles_is_compiled_once(kind: str, do_sample: bool, padded: bool):
    torch._dynamo.reset()
    replays = Replays()
    ours = late(LateChannel(2), max_in_flight=3)
    settings = {"max_new_tokens": 12, "do_sample": do_sample, "cache_implementation": "static", "output_scores": True,
                "output_logits": True, "return_dict_in_generate": True}  # fmt: skip

    def stopping() -> Any:
        return transformers.StoppingCriteriaList([RowsStopAt([8, 7, 8])])

    with attending(kind, "sdpa") as model, given_to_compiled(model) as given:
        run = functools.partial(seeded, model, prompts("left" if padded else "full"), stopping_criteria=stopping)
        found = [
            run(way, compile_config=replays.config(), **settings) if compiled else run(way, **settings)
            for way, compiled in (({}, False), ({}, True), (ours, True), ({}, True), (ours, True))
        ]
    assert replays.compiled == 1
    # One step of each run is its prompt's, which is not compiled.
    assert [len(steps) for steps in given] == [3, 5, 3, 5], "no overshoot ran"
    assert all(type(each) is torch.Tensor for steps in given for step in steps for each in step.values())
    for tokens, state in found[1:]:
        assert_same(found[0][0], tokens)
        assert torch.equal(found[0][1], state)


@contextlib.contextmanager
def given_to_compiled(model: Any) -> Iterator[list[list[dict[str, Any]]]]:
    runs: list[list[dict[str, Any]]] = []
    compiled_call = type(model).get_compiled_call

    def watched(self: Any, config: Any) -> Any:
        call = compiled_call(self, config)
        steps: list[dict[str, Any]] = []
        runs.append(steps)

        def step(**inputs: Any) -> Any:
            steps.append({name: each for name, each in inputs.items() if isinstance(each, torch.Tensor)})
            return call(**inputs)

        return step

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(model), "get_compiled_call", watched)
        yield runs


@pytest.mark.skipif(not HAS_POSITIONS, reason="of transformers 4.57")
def test_an_older_transformers_prepares_each_step():
    model = tiny_models.model("llama")
    cache = transformers.StaticCache(config=model.config, max_cache_len=8)
    with reused_inputs(model, {"past_key_values": cache}):
        assert not {"prepare_inputs_for_generation", "_update_model_kwargs_for_generation"} & set(vars(model))


# Nothing but the reads is different


def prompts(kind_of_mask: str) -> dict[str, Any]:
    side = kind_of_mask if kind_of_mask in ("left", "right") else "left"
    inputs = tiny_models.prompts([4, 4, 4] if kind_of_mask != side else [4, 2, 3], side)
    if kind_of_mask == "bool":
        inputs["attention_mask"] = inputs["attention_mask"].bool()
    if kind_of_mask == "twos":
        inputs["attention_mask"] *= 2
    if kind_of_mask == "none":
        del inputs["attention_mask"]
    return inputs


def tensors_of(given: dict[str, Any]) -> dict[str, torch.Tensor]:
    tensors = {name: each for name, each in given.items() if isinstance(each, torch.Tensor)}
    return {name: each.as_subclass(torch.Tensor).clone() for name, each in tensors.items()}


@pytest.mark.parametrize("kind", ["llama", "gpt2", "sliding", "hybrid"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("mask", ["full", "left", "right", "bool", "twos", "none"])
def test_inputs_and_outputs_are_those_of_the_synchronous_loop(kind: str, attention: str, cache: str, mask: str):
    def stopping() -> Any:
        return transformers.StoppingCriteriaList([RowsStopAt([7, 6, 7])])

    inputs = prompts(mask)
    settings = {name: value for name, value in EVERYTHING.items() if attention == "eager" or "attentions" not in name}
    found, given = [], []
    for way in ({}, late(LateChannel(2), max_in_flight=3)):
        with attending(kind, attention) as model, given_to_forward(model, tensors_of) as steps:
            found.append(seeded(model, inputs, way, max_new_tokens=12, do_sample=True, stopping_criteria=stopping,
                                cache_implementation=cache, **settings))  # fmt: skip
        given.append(steps)
    assert_same(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
    assert [len(steps) for steps in given] == [3, 5], "no overshoot ran"
    for one, other in zip(*given, strict=False):
        assert set(one) == set(other)
        for name in one:
            # Nothing that depends on the tokens is compared: those of overshoot are of no step.
            assert one[name].dtype == other[name].dtype, name
            assert torch.equal(one[name], other[name]), name


def continued(model: Any, way: dict[str, Any]) -> tuple[torch.Tensor, int]:
    inputs = tiny_models.prompts([4, 2])
    cache = transformers.DynamicCache(config=model.config)
    stop = transformers.StoppingCriteriaList([RowsStopAt([7, 6])])
    settings = {"past_key_values": cache, **way}
    first = model.generate(**inputs, max_new_tokens=9, stopping_criteria=stop, **settings)
    mask = torch.cat([inputs["attention_mask"], torch.ones(2, first.shape[1] - 4, dtype=torch.long)], dim=-1)
    tokens = model.generate(first, attention_mask=mask, max_new_tokens=5, **settings)
    return tokens, int(cache.get_seq_length())


def from_embeddings(model: Any, way: dict[str, Any]) -> torch.Tensor:
    inputs = tiny_models.prompts([4, 2])
    embeds = model.get_input_embeddings()(inputs["input_ids"])
    mask = inputs["attention_mask"]
    return model.generate(inputs_embeds=embeds, attention_mask=mask, max_new_tokens=6, **way)


def without_a_cache(model: Any, way: dict[str, Any]) -> torch.Tensor:
    return model.generate(**tiny_models.prompts([4, 2]), use_cache=False, max_new_tokens=6, **way)


def in_chunks(model: Any, way: dict[str, Any]) -> torch.Tensor:
    return model.generate(**tiny_models.prompts([5, 3]), prefill_chunk_size=2, max_new_tokens=6, **way)


@pytest.mark.parametrize("call", [continued, from_embeddings, without_a_cache, in_chunks])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_other_ways_to_give_a_prompt(kind: str, call: Any):
    channel = LateChannel(1)
    with attending(kind, "sdpa") as model:
        expected, found = call(model, {}), call(model, late(channel))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert channel.sent > 0
