"""What the host knows of the inputs of a step, and the inputs that are left alone."""

import copy
from typing import Any

import pytest
import tiny_models
import torch
import transformers
from prepared_inputs import HAS_POSITIONS

from vllm_async_spec.audit.cuda_waits import CudaWaits
from vllm_async_spec.generation.known_inputs import (
    Count,
    KnownTensor,
    Padding,
    Value,
    carry,
    inputs_after,
    known_inputs,
    known_of,
)


def test_inputs_are_changed_as_long_as_anybody_generates():
    model = tiny_models.model("llama")
    step = {"input_ids": torch.ones(1, 3, dtype=torch.long), "use_cache": True}
    if HAS_POSITIONS:
        step["cache_position"] = torch.arange(3)

    def doubled(each: Any) -> Any:
        return each * 2 if isinstance(each, torch.Tensor) else each

    def prepared() -> int:
        return int(model.prepare_inputs_for_generation(**step)["input_ids"].max())

    first, second = inputs_after(model, doubled), inputs_after(model, doubled)
    first.__enter__()
    second.__enter__()
    assert prepared() == 2
    first.__exit__(None, None, None)
    assert prepared() == 2
    second.__exit__(None, None, None)
    assert prepared() == 1
    assert "prepare_inputs_for_generation" not in vars(model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "prepare_inputs_for_generation", own := lambda **kwargs: {"input_ids": torch.tensor(5)})
        with inputs_after(model, doubled):
            assert prepared() == 10
        assert model.prepare_inputs_for_generation is own


# What is left alone


def known_of_loop(model: Any, given: dict[str, Any]) -> Any:
    return known_inputs(model, torch.ones(2, 4), transformers.GenerationConfig(), given)


@pytest.mark.parametrize(
    "mask",
    [torch.ones(2, 1, 4, 4), torch.tensor([[1, 2], [0, 1]]), torch.tensor([[0.5, 1.0]]), {"full_attention": None}],
    ids=["4-D", "twos", "halves", "by layer"],
)
def test_a_mask_of_another_kind_is_left_alone(mask: Any):
    given = {"attention_mask": mask}
    with known_of_loop(tiny_models.model("llama"), given) as known:
        assert known["attention_mask"] is mask


def by_module(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model.model.layers[0], "_compiled_call_impl", lambda: None)


def by_forward(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "forward", torch.compile(model.forward))


def by_wrapper(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(model.model._modules, "norm", torch.compile(model.model.norm))


def by_transformers(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(model), "_valid_auto_compile_criteria", lambda *args: True)


@pytest.mark.parametrize("compiled", [by_module, by_forward, by_wrapper, by_transformers])
def test_what_is_compiled_is_given_plain_tensors(compiled: Any, monkeypatch: pytest.MonkeyPatch):
    model = tiny_models.model("llama")
    compiled(model, monkeypatch)
    given = {"attention_mask": torch.ones(2, 4)}
    with known_of_loop(model, given) as known:
        assert known["attention_mask"] is given["attention_mask"]
        assert isinstance(known.get("cache_position"), KnownTensor) is HAS_POSITIONS
        prepared = model.prepare_inputs_for_generation(torch.ones(2, 4, dtype=torch.long), **known)
    tensors = {name: each for name, each in prepared.items() if isinstance(each, torch.Tensor)}
    assert {"input_ids", "attention_mask"} <= set(tensors)
    assert {type(each) for each in tensors.values()} == {torch.Tensor}


def test_inputs_of_flex_attention_are_left_alone(monkeypatch: pytest.MonkeyPatch):
    model = tiny_models.model("llama")
    monkeypatch.setattr(model.config, "_attn_implementation_internal", "flex_attention")
    given = {"attention_mask": torch.ones(2, 4)}
    with known_of_loop(model, given) as known:
        assert known is given


# What is known


def positions(*values: int) -> KnownTensor:
    """Positions whose value on the host is told apart from that of the device: it is a hundred more."""
    return carry(torch.tensor(values), Value(torch.tensor(values) + 100))


def test_what_is_read_is_what_the_host_knows_and_what_is_computed_the_devices():
    last = positions(4, 5)[-1:] + 1
    assert last[-1].item() == int(last[0]) == 106
    assert list(range(200))[last[-1]] == 106
    assert bool(last[0] >= 106)
    assert last.tolist() == [106]
    assert (last * 1).tolist() == [6]
    assert torch.zeros(9).index_fill(0, last, 1.0)[6] == 1


def test_a_mask_that_is_continued_with_ones_is_known():
    for padded in (False, True):
        mask = carry(torch.zeros(2, 3, dtype=torch.long), Padding(padded))  # whose values say nothing
        mask = torch.cat([mask, mask.new_ones((2, 1))], dim=-1).to(dtype=torch.bool)
        assert bool(mask.all()) is bool(torch.all(mask == 1)) is bool(mask.sum() == 8) is not padded
        assert known_of(mask.sum() == 7) is None
        assert known_of(mask[:, torch.tensor([0, 1])]) == (None if padded else Padding(False))


def test_a_mask_is_known_while_an_audit_watches(monkeypatch: pytest.MonkeyPatch):
    """It puts a function of its own into the place of PyTorch's, which a tensor is then told of."""
    monkeypatch.setattr(torch.Tensor, "to", CudaWaits()._noting_copies(torch.Tensor.to))
    mask = carry(torch.zeros(2, 3, dtype=torch.long), Padding(False)).to(dtype=torch.bool)
    assert bool(mask.all())


@pytest.mark.parametrize(
    "computed",
    [
        lambda mask: torch.nn.functional.pad(mask, (0, 1)),
        lambda mask: torch.cat([mask, torch.zeros(2, 1)], dim=-1),
        lambda mask: 1 - mask,
        lambda mask: mask == 0,
        lambda mask: mask == torch.ones_like(mask),
        lambda mask: mask.eq(other=1),
        copy.deepcopy,
        lambda mask: mask.all(dim=-1),
        lambda mask: mask.sum(dim=-1),
        lambda mask: mask.cumsum(-1),
    ],
)
def test_of_all_else_nothing_is_known(computed: Any):
    mask = carry(torch.ones(2, 3), Padding(False))
    assert known_of(computed(mask)) is None
    assert torch.equal(computed(mask), computed(torch.ones(2, 3)))


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize(
    "write",
    [
        lambda mask: mask.mul_(0),
        lambda mask: mask.__setitem__((0, 0), 0),
        lambda mask: mask.__imul__(0),
        lambda mask: mask[:, :2].zero_(),
        lambda mask: mask.t()[:2].zero_(),
        lambda mask: mask.unbind()[0].zero_(),
        lambda mask: mask.data.zero_(),
        lambda mask: mask.numpy().fill(0),
    ],
    ids=["mul_", "setitem", "imul", "known view", "view", "views", "data", "numpy"],
)
def test_what_was_written_to_is_not_known(write: Any, inference: bool):
    with torch.inference_mode(inference):
        mask = carry(torch.ones(2, 3, dtype=torch.long), Padding(False))
        write(mask)
        assert known_of(mask) is None
        assert not mask.all()


def test_a_write_under_another_name_is_seen_by_the_version():
    plain = torch.ones(2, 3)
    mask = carry(plain, Padding(False))
    plain[0, 0] = 0
    assert not mask.all()


def test_a_count_answers_for_all_of_it_only():
    count = carry(torch.tensor(6), Count(6, padded=True))
    assert not bool(count == 6)
    assert known_of(count == 5) is None
    assert known_of(count >= 6) is None


@pytest.mark.skipif(not HAS_POSITIONS, reason="this transformers gives a step no cache_position")
def test_known_positions_are_those_of_the_device():
    with known_of_loop(tiny_models.model("llama"), {}) as known:
        positions = known["cache_position"]
    assert positions.tolist() == positions.clone().tolist() == [0, 1, 2, 3]
