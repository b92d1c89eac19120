"""What a batcher is made with."""

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import tiny_models
import torch
from small_batchers import EOS, LENGTH, make, submit_all, tokens

from vllm_async_spec.generation import BatcherConfig, ContinuousBatcher
from vllm_async_spec.generation.batching import AttentionChoiceError, BatcherError, ModelError


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_batch": 0}, "max_batch is 0; it must be at least 1"),
        ({"max_batch": 2.5}, "max_batch is 2.5; it must be a whole number"),
        ({"max_prefills": None}, "max_prefills is None; it must be a whole number"),
        ({"decode_sizes": [1.5, 3]}, r"decode_sizes is \[1.5, 3\]; it must be a sequence of whole numbers"),
        ({"eos_token_id": "a"}, "eos_token_id is 'a'; it must be a token id, or a sequence of these"),
        ({"max_length": -1}, "max_length is -1; it must be at least 1"),
        ({"max_length": 4096}, "max_length is 4096 and the model has 2048 positions; give at most 2048"),
        ({"page_size": 0}, "page_size is 0; it must be at least 1"),
        ({"steps_ahead": 0}, "steps_ahead is 0; it must be at least 1"),
        (
            {"decode_sizes": [1, 2]},
            r"decode_sizes is \[1, 2\]; the sizes must be positive, and the largest must be max_batch, 3",
        ),
        ({"cuda_graphs": True}, "cuda_graphs is True and the model is on cpu; leave out cuda_graphs, or move"),
        (
            {"torch_compile": {"mode": "reduce-overhead"}},
            "makes its own CUDA graphs, but this package already captures",
        ),
        ({"torch_compile": 2}, "torch_compile is 2; it must be bool or str or dict"),
        ({"torch_compile": "fast"}, "torch_compile has the backend 'fast', which PyTorch does not know; leave out"),
        ({"attention": "FAST"}, "attention is 'FAST'; it must be auto, FLASH_ATTN, FLASHINFER_TRTLLM, TORCH_REFERENCE"),
        ({"attention": "FLASH_ATTN"}, "FLASH_ATTN needs a CUDA device, and the model is on cpu"),
    ],
)
def test_a_bad_option_is_refused_by_name(options: dict[str, Any], message: str):
    model = tiny_models.model("llama")
    with pytest.raises((ValueError, AttentionChoiceError), match=message):
        make(**options)
    assert model.config._attn_implementation == "eager"


def test_the_settings_may_still_be_keyword_arguments():
    expected = tokens()
    message = r"this release only: give max_batch, max_length, eos_token_id in a config, as in .*BatcherConfig"
    with pytest.warns(DeprecationWarning, match=message) as told:
        batcher = ContinuousBatcher(tiny_models.model("llama"), max_batch=3, max_length=LENGTH, eos_token_id=EOS)
    assert [(each.category, each.filename) for each in told] == [(DeprecationWarning, __file__)]
    with batcher:
        found = submit_all(batcher)
        batcher.run()
    assert [request.result() for request in found] == expected


def test_settings_that_are_none_are_refused():
    model, config = tiny_models.model("llama"), BatcherConfig(max_batch=3)
    with pytest.raises(TypeError, match=r"needs a config, such as BatcherConfig\(max_batch=8\)"):
        ContinuousBatcher(model)
    with pytest.raises(TypeError, match="a config and max_length, synchronous were given; put all settings into"):
        ContinuousBatcher(model, config=config, max_length=9, synchronous=True)
    with (
        pytest.warns(DeprecationWarning, match="in a config"),
        pytest.raises(TypeError, match="unexpected keyword argument 'max_batches'"),
    ):
        ContinuousBatcher(model, max_batch=3, max_batches=3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.max_batch = 4  # type: ignore[misc]
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("encoder-decoder", "T5ForConditionalGeneration has an encoder; only decoder-only models"),
        ("softcap", "Gemma2Attention attends with softcap, which no adapter supports"),
        ("bias", "DogeAttention attends with a mask or bias of its own, which no"),
        ("window in mask", "MoshiForCausalLM (has sliding layers, and passes no window|does not use)"),
        ("mamba beside", "FalconH1ForCausalLM has (a recurrent state|layers of type hybrid)"),
        ("bloom", r"BloomForCausalLM does not use transformers' AttentionInterface, .* use model.generate"),
    ],
)
def test_a_model_that_can_not_be_batched_is_told_why(kind: str, message: str):
    with pytest.raises(ModelError, match=message):
        make(kind)


def test_a_cache_that_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch):
    def no_memory(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("tried to allocate")

    monkeypatch.setattr("vllm_async_spec.generation.batching.paged_cache.PagedCache", no_memory)
    with pytest.raises(
        BatcherError, match=r"a KV cache of 208 tokens does not fit .*; give smaller cache_tokens, .* tried"
    ):
        make(page_size=16)
    assert tiny_models.model("llama").config._attn_implementation == "eager"


def test_a_model_in_training_mode_is_refused():
    model = tiny_models.model("llama")
    model.train()
    try:
        with pytest.raises(ModelError, match="is in training mode, so dropout is active; call the model's eval"):
            make()
    finally:
        model.eval()


def test_the_model_belongs_to_one_batcher_until_that_is_closed():
    model = tiny_models.model("llama")
    with make() as batcher:
        with pytest.raises(ModelError, match="belongs to a ContinuousBatcher; close that batcher first"):
            make()
        with pytest.raises(RuntimeError, match=r"belongs to a ContinuousBatcher; call the batcher's close\(\)"):
            model(input_ids=torch.tensor([[1]]))
        left = batcher.submit([1, 2], max_new_tokens=40)
        batcher.step()
    batcher.close()
    assert (left.finish_reason, str(left.error)) == ("error", "the batcher was closed")
    with pytest.raises(BatcherError, match="the batcher is closed; make another"):
        batcher.submit([1])
    assert model(input_ids=torch.tensor([[1]])).logits.shape == (1, 1, tiny_models.VOCABULARY)


def test_closing_restores_the_attention_of_each_part_of_the_model():
    config = tiny_models.model("vision").config
    parts, before = (config, config.text_config, config.vision_config), ["sdpa", "eager", "sdpa"]
    for part, attention in zip(parts, before, strict=True):
        part._attn_implementation = attention
    with make("vision"):
        assert config.text_config._attn_implementation == "vllm_async_spec_paged"
    assert [part._attn_implementation for part in parts] == before


def test_whether_it_is_synchronous_is_changed_between_runs_only():
    expected = tokens()
    with make() as batcher:
        assert not batcher.synchronous
        found = []
        for synchronous in (True, False):
            batcher.synchronous = synchronous
            requests = submit_all(batcher)
            with pytest.raises(BatcherError, match="synchronous can't be changed while requests run"):
                batcher.synchronous = False
            batcher.run()
            found.append([request.result() for request in requests])
        assert found[0] == found[1] == expected


def test_one_thread_steps_at_a_time():
    with make() as batcher:
        batcher.submit([1, 2], max_new_tokens=4)
        with batcher._stepping, ThreadPoolExecutor(1) as another:
            step = another.submit(batcher.step)
            with pytest.raises(BatcherError, match="runs in another thread"):
                step.result()
