"""What interleaved generation refuses, where it falls back, and how its switches follow each other."""

import threading
from typing import Any

import pytest
import tiny_models
import torch
import transformers
from generating import may_wait
from interleaving_runs import both, recorded, ways

from vllm_async_spec import generation
from vllm_async_spec.generation.interleaved import DecodeSwitches

__all__ = ["recorded"]  # a fixture
pytestmark = may_wait


def generate(**kwargs: Any) -> None:
    given = {"max_new_tokens": 3, "custom_generate": generation.generate, "interleaved": True, **kwargs}
    tiny_models.model("llama").generate(**given)


@pytest.mark.parametrize(
    ("kwargs", "sentence"),
    [
        ({"prompt_lookup_num_tokens": 2}, "not assisted_generation"),
        ({"return_dict_in_generate": True}, "returns only tokens, and return_dict_in_generate is set"),
        ({"use_cache": False}, "needs a cache, and use_cache is off"),
        ({"past_key_values": transformers.DynamicCache}, "makes its own cache, and a cache was passed"),
        ({"cache_implementation": "offloaded"}, "can't use the cache that cache_implementation='offloaded' selects"),
        ({"cache_implementation": "dynamic"}, "static_cache and cache_implementation='dynamic' contradict each other"),
        ({"prefill_chunk_size": 2}, "prefills prompts in one step, and prefill_chunk_size is set"),
        ({"labels": {"of an image": torch.ones(1)}}, "gives the model only tokens, and labels was passed"),
        ({"max_in_flight": 1.5}, "max_in_flight is 1.5; it must be int"),
        ({"poll_every": "2"}, "poll_every is '2'; it must be int"),
        ({"poll_every": True}, "poll_every is True; it must be int"),
        ({"max_in_flight": -1}, "max_in_flight is -1; it must be at least 1"),
        ({"static_cache": False, "cuda_graphs": True}, "cuda_graphs needs static_cache"),
        ({"static_cache": False, "torch_compile": True}, "torch_compile needs static_cache"),
        ({"static_cache": False, "torch_compile": {}}, "torch_compile needs static_cache"),
        ({"torch_compile": 2}, "torch_compile is 2; it must be bool or str or dict"),
        ({"torch_compile": {"dynamic": True}}, "torch_compile has the argument 'dynamic'; it takes only backend, full"),
        (
            {"torch_compile": {"mode": "default", "options": {}}},
            "both the mode 'default' and options, but PyTorch takes only one",
        ),
        (
            {"torch_compile": {"mode": "reduce-overhead"}},
            "makes its own CUDA graphs, but this package already captures",
        ),
        ({"torch_compile": {"options": {"triton.cudagraphs": True}}}, "use the mode 'max-autotune-no-cudagraphs'"),
        ({"cuda_graphs": "yes"}, "cuda_graphs is 'yes'; it must be bool"),
        ({"memory_limit": 0}, "memory_limit is 0; it must be at least 1 byte"),
        ({"memory_limit": 2.5}, "memory_limit is 2.5; it must be int or NoneType"),
        ({"interleaved": None, "static_cache": True}, "static_cache is True, and transformers' own loop has no such"),
        ({"interleaved": 1}, "interleaved is 1; it must be bool"),
    ],
)
def test_what_it_can_not_do_is_refused_in_a_sentence(kwargs: dict[str, Any], sentence: str):
    given = {name: make() if isinstance(make, type) else make for name, make in kwargs.items()}
    with pytest.raises(ValueError, match=sentence):
        generate(**tiny_models.prompts([3]), **given)


def test_embeddings_of_the_prompt_are_refused():
    embed = tiny_models.model("llama").get_input_embeddings()
    with pytest.raises(ValueError, match="gives the model only tokens, and inputs_embeds was passed"):
        generate(inputs_embeds=embed(tiny_models.prompts([3])["input_ids"]))


def test_a_step_that_reads_the_device_is_refused(recorded: None, monkeypatch: pytest.MonkeyPatch):
    model = tiny_models.model("llama")
    forward = type(model).forward

    def reads(self: Any, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        assert int(input_ids.max()) >= 0
        return forward(self, input_ids, *args, **kwargs)

    monkeypatch.setattr(type(model), "forward", reads)
    generation.release(model)
    with pytest.raises(
        ValueError, match=r"LlamaForCausalLM can't be captured in a CUDA graph: .* pass cuda_graphs=False"
    ):
        both("llama", tiny_models.prompts([3]), ways(), max_new_tokens=9)


def test_a_second_thread_is_refused():
    inside, go_on, errors = threading.Event(), threading.Event(), []

    class Waits(transformers.LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            inside.set()
            go_on.wait(30)
            return scores

    def run(*processors: Any) -> None:
        chosen = transformers.LogitsProcessorList(processors)
        generate(**tiny_models.prompts([3]), logits_processor=chosen)

    def first() -> None:
        try:
            run(Waits())
        except Exception as error:  # shown by the assertion
            errors.append(error)

    thread = threading.Thread(target=first)
    thread.start()
    assert inside.wait(30)
    try:
        with pytest.raises(RuntimeError, match="this LlamaForCausalLM already generates, in another thread"):
            run()
    finally:
        go_on.set()
        thread.join()
    assert not errors
    run()


def test_switches_follow_each_other():
    assert DecodeSwitches.of(None) is None
    assert DecodeSwitches.of(True) == DecodeSwitches(interleaved=True)
    assert DecodeSwitches.of(False, static_cache=False) == DecodeSwitches(False, static_cache=False, cuda_graphs=False)


@pytest.mark.parametrize(
    ("chosen", "arguments"),
    [
        (False, None),
        (True, {"backend": "inductor"}),
        ("eager", {"backend": "eager"}),
        ({}, {}),
        ({"mode": "max-autotune-no-cudagraphs"}, {"mode": "max-autotune-no-cudagraphs"}),
        ({"options": {"max_autotune": True}}, {"options": {"max_autotune": True}}),
    ],
)
def test_what_is_compiled_with_is_what_was_asked_for(chosen: Any, arguments: dict[str, Any] | None):
    assert DecodeSwitches(True, torch_compile=chosen).compiles_with == arguments
