"""What interleaved generation keeps for a model."""

import contextlib
import copy
from typing import Any

import pytest
import tiny_models
import torch
import transformers
from generating import may_wait
from interleaving_runs import Favours, assert_same, both, recorded, ways
from switched_on import nothing_said

from vllm_async_spec import generation
from vllm_async_spec.generation import decode, workspace
from vllm_async_spec.generation.graph_key import frozen_in_graphs, why_not_captured
from vllm_async_spec.generation.workspace import MemoryReport, reserved

__all__ = ["nothing_said", "recorded"]  # fixtures
pytestmark = may_wait


def test_a_second_generation_uses_what_was_made_for_the_first(recorded: None):
    inputs = tiny_models.prompts([3, 2])
    model = tiny_models.model("llama")
    assert_same(*both("llama", inputs, ways(), max_new_tokens=20))
    first = workspace._kept[model]
    for seed, new_tokens in ((1, 20), (2, 7)):
        assert_same(*both("llama", tiny_models.prompts([1, 3], "left", seed), ways(), max_new_tokens=new_tokens))
        assert workspace._kept[model] is first


def test_a_second_generation_reads_nothing_that_went_with_the_first(recorded: None):
    """Transformers makes the ids of end and padding at each call; a captured step reads those of its own."""
    inputs = tiny_models.prompts([3, 2], "left", 3)
    settings: dict[str, Any] = {"max_new_tokens": 20, "do_sample": True, "eos_token_id": [2, 5], "pad_token_id": 1}
    for two_slots in (True, False):
        expected, found = both("llama", inputs, {**ways(), "interleaved": two_slots}, **settings)
        assert (expected[0][:, -1] == 1).sum() == 1, "no row stops before the other, so that none is padded"
        assert_same(expected, found)


@pytest.mark.parametrize(
    "other",
    [
        {"max_new_tokens": 21},
        {"temperature": 0.7},
        {"eos_token_id": 4},
        {"pad_token_id": 3},
        {"do_sample": False},
        {"top_k": 3},
        {"logits_processor": lambda: transformers.LogitsProcessorList([Favours()])},
    ],
    ids=lambda other: next(iter(other)),
)
def test_what_a_recorded_step_depends_on_is_looked_at(recorded: None, other: dict[str, Any]):
    inputs = tiny_models.prompts([3, 2])
    settings: dict[str, Any] = {"max_new_tokens": 20, "do_sample": True, "eos_token_id": 2}
    assert_same(*both("llama", inputs, ways(), **settings))
    first = workspace._kept[tiny_models.model("llama")]
    assert_same(*both("llama", inputs, ways(), **settings | other))
    assert workspace._kept[tiny_models.model("llama")] is not first


def test_weights_that_moved_are_noticed(recorded: None):
    inputs = tiny_models.prompts([3, 2])
    model = tiny_models.model("llama")
    assert_same(*both("llama", inputs, ways(), max_new_tokens=20))
    before = model.lm_head.weight.data
    try:
        model.lm_head.weight.data = before.flip(0).contiguous()
        assert_same(*both("llama", inputs, ways(), max_new_tokens=20))
    finally:
        model.lm_head.weight.data = before


@pytest.mark.parametrize("how", ["attribute", "hook", "forward"])
def test_a_changed_module_is_noticed(recorded: None, monkeypatch: pytest.MonkeyPatch, how: str):
    inputs = tiny_models.prompts([3, 2])
    layer = tiny_models.model("llama").model.layers[0]
    assert_same(*both("llama", inputs, ways(), max_new_tokens=20))
    forward = layer.mlp.forward
    with contextlib.ExitStack() as undo:
        if how == "attribute":
            monkeypatch.setattr(layer.self_attn, "scaling", layer.self_attn.scaling * 9)
        elif how == "forward":
            monkeypatch.setattr(layer.mlp, "forward", lambda states: forward(states) * -3)
        else:
            undo.enter_context(layer.mlp.register_forward_hook(lambda module, given, states: states * -3))
        assert_same(*both("llama", inputs, ways(), max_new_tokens=20))
    monkeypatch.undo()
    assert_same(*both("llama", inputs, ways(), max_new_tokens=20))


class Adapted(torch.nn.Module):
    """A linear layer with two adapters, chosen and scaled as PEFT does: by a list of names, and a dict of numbers."""

    def __init__(self, base: torch.nn.Linear):
        super().__init__()
        self.base = base
        self._active_adapter = ["a"]
        self.scaling = {"a": 3.0, "b": 3.0}
        shape = (base.out_features, base.in_features)
        self.added = torch.nn.ParameterDict({name: torch.randn(shape) for name in "ab"})

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        active = [self.scaling[name] * (states @ self.added[name].T) for name in self._active_adapter]
        return torch.stack([self.base(states), *active]).sum(0)


@pytest.mark.parametrize("what", ["adapter", "scale"])
def test_another_adapter_is_noticed(recorded: None, monkeypatch: pytest.MonkeyPatch, what: str):
    torch.manual_seed(1)
    mlp = tiny_models.model("llama").model.layers[0].mlp
    adapted = Adapted(mlp.up_proj)
    monkeypatch.setitem(mlp._modules, "up_proj", adapted)
    inputs = tiny_models.prompts([3, 2])
    assert_same(*both("llama", inputs, ways(), max_new_tokens=20))
    if what == "adapter":
        adapted._active_adapter[0] = "b"
    else:
        adapted.scaling["a"] = -9.0
    assert_same(*both("llama", inputs, ways(), max_new_tokens=20))


def test_another_configuration_is_noticed(recorded: None, monkeypatch: pytest.MonkeyPatch):
    """A cap of logits changes what is drawn at a high temperature."""
    config = tiny_models.model("softcap").config
    inputs = tiny_models.prompts([3, 2])
    settings: dict[str, Any] = {"max_new_tokens": 20, "do_sample": True}
    for cap in (0.1, None, 30.0):
        monkeypatch.setattr(config, "final_logit_softcapping", cap)
        assert_same(*both("softcap", inputs, ways(), **settings))


def test_a_hook_runs_at_each_step(recorded: None, nothing_said: None):
    model, inputs = tiny_models.model("llama"), tiny_models.prompts([3])
    assert_same(*both("llama", inputs, ways(), max_new_tokens=9))
    seen: list[Any] = []
    with (
        model.model.layers[0].mlp.register_forward_pre_hook(lambda module, given: seen.append(given[0].clone())),
        pytest.warns(match="^steps run without CUDA graphs: a LlamaMLP has a forward hook, .*, or pass cuda_graphs=F"),
    ):
        expected, found = both("llama", inputs, ways(), max_new_tokens=9)
    assert_same(expected, found)
    assert len(seen) == 18
    assert all(torch.allclose(*each, atol=1e-5) for each in zip(seen[:9], seen[9:], strict=True))


def test_what_is_kept_of_a_module_may_hold_itself_and_hooks_of_transformers():
    module = torch.nn.Linear(1, 1)
    module.names = names = ["a", {"b": (None, {1.5})}]
    names.append(names)
    before = frozen_in_graphs(module)
    assert before == frozen_in_graphs(module)
    names[1]["b"][1].add(2.5)
    assert before != frozen_in_graphs(module)

    def collects(*_: Any) -> None:
        """As those that transformers leaves on a model whose hidden states were asked for."""

    collects.__module__ = "transformers.utils.output_capturing"
    module.register_forward_hook(collects)
    assert why_not_captured(module) is None
    module.register_forward_hook(print)
    assert why_not_captured(module) is not None


def test_a_cache_has_the_dtype_of_its_generation():
    model = type(tiny_models.model("gpt2"))(tiny_models.model("gpt2").config).eval()
    given = {"max_new_tokens": 9, "pad_token_id": 0, **tiny_models.prompts([3, 2])}
    for dtype, autocast in ((torch.float32, True), (torch.float32, False), (torch.bfloat16, False)):
        model.to(dtype)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            found = model.generate(**given, custom_generate=generation.generate, **ways())
            assert torch.equal(found, model.generate(**given))


def test_it_runs_in_inference_mode_and_out_of_it(recorded: None):
    inputs = tiny_models.prompts([3, 2])
    with torch.inference_mode():
        assert_same(*both("llama", inputs, ways(), max_new_tokens=9))
    # transformers 4.57 keeps its own static cache, and could not write it out of inference mode.
    vars(tiny_models.model("llama")).pop("_cache", None)
    assert_same(*both("llama", inputs, ways(), max_new_tokens=9))


def test_release_frees_it(recorded: None):
    model = tiny_models.model("llama")
    generation.release(model)
    both("llama", tiny_models.prompts([3]), ways(), max_new_tokens=9)
    report = generation.memory_report(model)
    # Keys and values of two layers, two heads of 8 floats, 11 tokens; nothing is reserved without a GPU.
    assert report.cache == 2 * 2 * 2 * 11 * 8 * 4
    assert report.buffers > 0
    assert (report.graph_pool, report.streams) == (0, ())
    assert report.total == report.cache + report.buffers
    generation.release(model)
    with pytest.raises(
        LookupError, match="no workspace is kept for this LlamaForCausalLM; generate with interleaved=True"
    ):
        generation.memory_report(model)


def test_the_limit_of_memory_is_kept(recorded: None):
    model = tiny_models.model("llama")
    inputs = tiny_models.prompts([3])
    both("llama", inputs, ways(), max_new_tokens=9)
    held = generation.memory_report(model).total
    both("llama", inputs, {**ways(), "memory_limit": held}, max_new_tokens=9)
    with pytest.raises(ValueError, match=rf"holds {held} bytes .* and memory_limit is {held - 1}; raise the limit"):
        both("llama", inputs, {**ways(), "memory_limit": held - 1}, max_new_tokens=9)
    with pytest.raises(LookupError):
        generation.memory_report(model)


def test_segments_are_told_apart_by_pool_and_stream():
    def segment(size: int, stream: int, pool: tuple[int, int] = (0, 0), expandable: bool = False) -> dict[str, Any]:
        return {"total_size": size, "stream": stream, "segment_pool_id": pool, "is_expandable": expandable}

    segments = [segment(1, 7), segment(2, 8), segment(4, 7, (0, 3)), segment(8, 9), segment(16, 8, (0, 4), True)]
    assert reserved(segments, pool=(0, 3), streams=(7, 8)) == (4, (1, 2), False)
    assert reserved(segments, pool=(0, 4), streams=()) == (16, (), True)
    assert reserved(segments, pool=None, streams=(9, 7)) == (0, (8, 1), False)
    assert MemoryReport(1, 2, 4, (8, 16), False).total == 31


def test_memory_that_runs_out_is_said_to_run_out(recorded: None, monkeypatch: pytest.MonkeyPatch):
    def runs_out(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(decode, "StepGraphs", runs_out)
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        both("llama", tiny_models.prompts([3]), ways(), max_new_tokens=9)


def test_expandable_segments_need_a_gpu_and_come_first(monkeypatch: pytest.MonkeyPatch):
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match="need a CUDA device, and PyTorch finds none; leave out"):
            generation.use_expandable_segments()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(RuntimeError, match="too late for expandable segments; call use_expandable_segments"):
        generation.use_expandable_segments()


def test_expandable_segments_leave_other_settings_be(monkeypatch: pytest.MonkeyPatch):
    told: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", told.append, raising=False)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:64")
    generation.use_expandable_segments()
    assert told == ["max_split_size_mb:64,expandable_segments:True"]


class Wrapped(torch.nn.Module):
    """A model within another, as PEFT has it."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        self._base = base

    def get_base_model(self) -> Any:
        return self._base


@pytest.mark.parametrize("wrapped", [lambda model: torch.compile(model, backend="eager"), Wrapped])
def test_a_wrapper_finds_what_is_kept_of_its_model(recorded: None, wrapped: Any):
    model = copy.deepcopy(tiny_models.model("llama"))
    model.generate(**tiny_models.prompts([3]), max_new_tokens=4, custom_generate=generation.generate, **ways())
    assert generation.memory_report(wrapped(model)) == generation.memory_report(model)
    generation.release(wrapped(model))
    with pytest.raises(LookupError, match="no workspace is kept"):
        generation.memory_report(model)
