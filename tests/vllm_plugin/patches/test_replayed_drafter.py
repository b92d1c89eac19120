"""Which batches are drafted for by graphs, and what graphs are given of them."""

import contextlib
import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_async_spec.spec_decode.draft_graphs import DraftShape
from vllm_async_spec.vllm_plugin.patches import replayed_drafter
from vllm_async_spec.vllm_plugin.patches.draft_first_pass import FirstPass, GivenFirstPass, returns_pair


@pytest.mark.parametrize(
    ("limits", "rows"),
    [
        ({}, 32),  # of 128 tokens
        ({"max_num_reqs": 20}, 20),
        ({"max_num_tokens": 39}, 9),
        ({"max_num_tokens": 39, "net_num_new_slots_per_request": 1}, 7),
    ],
)
def test_the_largest_batch_fits_into_what_vllm_captures_and_into_the_drafters_buffers(
    limits: dict[str, int], rows: int
):
    values = {"max_num_reqs": 64, "max_num_tokens": 512, "num_speculative_tokens": 3} | limits
    compilation = SimpleNamespace(max_cudagraph_capture_size=128)
    runner: Any = SimpleNamespace(
        drafter=SimpleNamespace(**values), compilation_config=compilation, max_num_reqs=values["max_num_reqs"]
    )
    assert replayed_drafter.most_rows(runner) == rows


@pytest.mark.parametrize("has", [(), ("use_cuda_graph",), ("use_cuda_graph", "cudagraph_dispatcher")])
def test_what_is_changed_of_the_drafter_for_a_capture_is_put_back(has: tuple[str, ...]) -> None:
    kept = {name: object() for name in has}
    drafter = SimpleNamespace(**kept)
    with contextlib.suppress(RuntimeError), replayed_drafter._launched_plainly(drafter):
        assert vars(drafter).keys() == kept.keys()
        assert not any(value is kept[name] for name, value in vars(drafter).items())
        raise RuntimeError("a failing capture")
    assert vars(drafter) == kept


class Graphs:
    """Stands in for captured graphs."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.given: dict[str, torch.Tensor] = {}

    def draft(self, rows: int, tensors: dict[str, torch.Tensor]) -> str:
        self.given = tensors
        return f"{self._name} {rows}"


class Model:
    """A drafter's model, whose states are twice and three times those that it gets."""

    pair = True

    def __call__(self, hidden_states: torch.Tensor) -> Any:
        states = 2 * hidden_states, 3 * hidden_states
        return states if self.pair else states[0]

    def compute_logits(self, states: torch.Tensor) -> torch.Tensor:
        raise AssertionError("the largest matrix is multiplied for a draft that nobody uses")

    get_top_tokens = compute_logits


HIDDEN = torch.arange(40, dtype=torch.float32).view(8, 5)
LAST = torch.tensor([3, 6])


def captured_drafter(*, rest: bool = False, chosen: bool = True) -> tuple[Any, dict[str, Any]]:
    """One with graphs of two requests and three drafts, and arguments for which it replays them.

    Args:
        rest: whether there are graphs of what follows the first pass.
        chosen: whether `propose` gets the number of drafts.
    """
    drafting: Any = replayed_drafter.Drafter.__new__(replayed_drafter.Drafter)
    drafter = SimpleNamespace(num_speculative_tokens=1, model=Model(), method="eagle")

    def propose(**given: Any) -> Any:
        if not isinstance(drafter.model, FirstPass):
            return "launched"
        drafts = given["num_speculative_tokens"] if chosen else drafter.num_speculative_tokens
        assert drafts == 1, "the draft steps are launched, and replayed after that"
        states = drafter.model(hidden_states=given["target_hidden_states"])
        last = given["last"] if given["last"] is not None else LAST
        sampled = (states[0] if isinstance(states, tuple) else states)[last]
        return drafter.model.compute_logits(sampled).argmax(-1)

    fields = {
        "_drafter": drafter,
        "_drafts": 3,
        "_tokens": 4,
        "_chosen": chosen,
        "_shape": DraftShape(2, 4, 5, 6, torch.float32),
        "sizes": [1, 2],
        "_last_indices": "last",
        "_graphs": Graphs("replayed"),
        "_rest": Graphs("rest replayed") if rest else None,
        "_first_pass": FirstPass(drafter.model),
        "_none_rejected": torch.zeros(2, dtype=torch.int32),
        "_propose": propose,
    }
    for name, value in fields.items():
        setattr(drafting, name, value)
    tensor = torch.arange(8)
    metadata = SimpleNamespace(
        num_reqs=2,
        max_query_len=4,
        num_actual_tokens=8,
        query_start_loc=torch.tensor([0, 4, 7]),
        slot_mapping=tensor,
        seq_lens=tensor,
        block_table_tensor=torch.zeros(8, 6),
    )
    names = ("target_token_ids", "target_positions", "next_token_ids")
    given: dict[str, Any] = dict.fromkeys(names, tensor)
    given |= {"last": LAST, "num_rejected_tokens_gpu": torch.tensor([1, 2])}
    return drafting, given | {"target_hidden_states": HIDDEN, "common_attn_metadata": metadata}


NOTHING = torch.zeros(8, dtype=torch.bool)


@pytest.mark.parametrize("rest", [False, True])
@pytest.mark.parametrize(
    ("changes", "answer"),
    [
        ({}, "replayed 2"),
        ({"mm_embed_inputs": None}, "replayed 2"),
        ({"mm_embed_inputs": ([], NOTHING)}, "replayed 2"),
        ({"mm_embed_inputs": ([torch.ones(1, 4)], NOTHING)}, "split"),
        ({"num_speculative_tokens": 3}, "replayed 2"),
        ({"num_speculative_tokens": 2}, "launched"),
        ({"num_rejected_tokens_gpu": None}, "split"),
    ],
)
def test_batches_that_a_graph_is_not_for_are_launched(changes: dict[str, Any], answer: str, rest: bool) -> None:
    """Images are among the inputs, or the scheduler wants fewer drafts, say."""
    drafting, given = captured_drafter(rest=rest)
    if answer == "split":
        answer = "rest replayed 2" if rest else "launched"
    assert drafting.propose(**given | changes) == answer
    assert drafting._drafter.num_speculative_tokens == (3 if answer != "launched" else 1)


@pytest.mark.parametrize("chosen", [True, False])
@pytest.mark.parametrize("pair", [True, False])
@pytest.mark.parametrize("indices", [True, False])
def test_graphs_get_the_states_and_positions_of_each_request_s_last_token(chosen: bool, pair: bool, indices: bool):
    drafting, given = captured_drafter(rest=True, chosen=chosen)
    model = drafting._drafter.model
    model.pair = pair
    metadata, axes = given["common_attn_metadata"], torch.arange(24).view(3, 8)
    metadata.num_actual_tokens = 7
    given["target_positions"] = axes
    if not indices:  # a step without drafts names none
        given |= {"last": None, "num_rejected_tokens_gpu": None}
    assert drafting.propose(**given) == "rest replayed 2"
    assert drafting._drafter.model is model
    found = drafting._rest.given
    assert torch.equal(found["positions"], axes[:, LAST])
    assert torch.equal(found["hidden_states"], HIDDEN[LAST])
    assert torch.equal(found["sampled_states"], 2 * HIDDEN[LAST])
    assert torch.equal(found["own_states"], (3 if pair else 2) * HIDDEN[LAST])
    assert found["rejected"].tolist() == ([1, 2] if indices else [0, 0])
    assert found["seq_lens"].tolist() == [0, 1]
    assert found["block_table"].shape == (2, 6)
    assert vars(drafting._first_pass) == {"_model": model, "_states": None, "_sampled": None}


def test_a_first_pass_that_fails_leaves_the_drafter_as_it_was():
    drafting, given = captured_drafter(rest=True, chosen=False)
    model = drafting._drafter.model
    given |= {"target_hidden_states": torch.zeros(0, 5), "num_rejected_tokens_gpu": None}
    with pytest.raises(IndexError):
        drafting.propose(**given)
    assert drafting._drafter.model is model
    assert drafting._drafter.num_speculative_tokens == 3


@pytest.mark.parametrize("name", ["target_hidden_states", "block_table_tensor"])
def test_inputs_of_another_width_end_the_replays(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """A target may return hidden states of another width than its configuration names."""
    drafting, given = captured_drafter()
    assert drafting.propose(**given) == "replayed 2"
    wide = torch.zeros(8, 7)
    given[name] = wide
    given["common_attn_metadata"].block_table_tensor = wide if name == "block_table_tensor" else torch.zeros(8, 6)
    with caplog.at_level(logging.INFO, "vllm.async_spec"):
        assert drafting.propose(**given) == "launched"
    assert drafting._drafter.propose is drafting._propose
    (line,) = caplog.messages
    assert line.startswith("vllm-async-spec no longer replays drafting as CUDA graphs: the drafter gets hidden states")


@pytest.mark.parametrize("pair", [True, False])
def test_a_given_first_pass_stands_for_the_model_s_first_call(pair: bool):
    """And for nothing else: the model samples, and runs the steps after it."""
    model, given = Model(), torch.ones(1, 5)
    states = (given, given) if pair else given
    stand_in: Any = GivenFirstPass(model, states)
    assert isinstance(stand_in, Model)  # as vLLM asks for EAGLE-3
    assert stand_in.pair
    assert stand_in(hidden_states=given) is states
    assert torch.equal(stand_in(hidden_states=given)[0], 2 * given)
    with pytest.raises(AssertionError, match="largest matrix"):
        stand_in.compute_logits(given)


def test_a_first_pass_samples_without_logits():
    model: Any = FirstPass(Model())
    model(hidden_states=HIDDEN)
    assert model.get_top_tokens(HIDDEN[LAST]).view(-1, 1).shape == (2, 1)
    assert torch.equal(model.taken(LAST)[0], HIDDEN[LAST])


def test_what_the_model_returns_is_asked_of_the_drafter():
    assert returns_pair(SimpleNamespace(model_returns_tuple=lambda: True, method="mtp"))
    assert not returns_pair(SimpleNamespace(method="mtp"))
    assert returns_pair(SimpleNamespace(method="eagle"))
