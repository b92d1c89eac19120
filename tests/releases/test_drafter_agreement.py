"""The patch `drafter-agreement` on the proposers of a real vLLM release, with two engines that are not there."""

import importlib
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from undone import applied, module_of

from vllm_async_spec.vllm_plugin.patches.drafter_agreement import asks_engines

MODULES = ("vllm.v1.spec_decode.llm_base_proposer", "vllm.v1.spec_decode.eagle")
AGREED = 32
"""Tokens that another engine has, and this one would be padded to."""


class SparseMoeBlock(torch.nn.Linear):
    """Named as vLLM names its own."""


DENSE, EXPERTS = torch.nn.Sequential(torch.nn.Linear(2, 2)), torch.nn.Sequential(SparseMoeBlock(2, 2))


@pytest.fixture
def proposers(release: str) -> Any:
    module_of(release, "drafter-agreement")
    for name in MODULES:
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError:
            continue
        if hasattr(module, "SpecDecodeBaseProposer"):
            return sys.modules[module.SpecDecodeBaseProposer.__module__]
    raise AssertionError("no module has the class")


@pytest.fixture
def patched(proposers: Any) -> Iterator[None]:
    with applied("drafter-agreement"):
        yield


class Other:
    """The other engine: what it sends, and the unpadded tokens that it has received."""

    def __init__(self) -> None:
        self.received: list[int] = []
        self.unpadded = AGREED

    def meet(
        self,
        *,
        should_ubatch: bool,
        orig_num_tokens_per_ubatch: int,
        padded_num_tokens_per_ubatch: int,
        cudagraph_mode: int,
        parallel_config: object,
    ) -> torch.Tensor:
        """In the place of vLLM's `_run_ar`."""
        self.received.append(orig_num_tokens_per_ubatch)
        rows = [[self.unpadded, orig_num_tokens_per_ubatch], [AGREED, padded_num_tokens_per_ubatch]]
        rows += [[0, int(should_ubatch)], [cudagraph_mode, cudagraph_mode]]
        return torch.tensor(rows, dtype=torch.int32)


@pytest.fixture
def other(proposers: Any, monkeypatch: pytest.MonkeyPatch) -> Other:
    made = Other()
    monkeypatch.setattr(importlib.import_module("vllm.v1.worker.dp_utils"), "_run_ar", made.meet)
    return made


def drafter(
    proposers: Any, model: torch.nn.Module, *, engines: int = 2, is_moe: bool = False, enable_elastic_ep: bool = False
) -> Any:
    from vllm.config import CUDAGraphMode

    def dispatch(num_tokens: int, valid_modes: Any = None, **given: object) -> tuple[Any, Any]:
        mode = CUDAGraphMode.PIECEWISE if valid_modes is None else next(iter(valid_modes))
        padded = num_tokens if mode is CUDAGraphMode.NONE else -(-num_tokens // 8) * 8
        return mode, SimpleNamespace(num_tokens=padded)

    made = object.__new__(type("Drafter", (proposers.SpecDecodeBaseProposer,), {"__init__": lambda self: None}))
    made.model, made.dp_rank, made.cudagraph_dispatcher = model, 1, SimpleNamespace(dispatch=dispatch)
    made.vllm_config = SimpleNamespace(
        parallel_config=SimpleNamespace(
            data_parallel_size=engines,
            data_parallel_rank=1,
            num_ubatches=2,
            enable_elastic_ep=enable_elastic_ep,
            disable_nccl_for_dp_synchronization=True,
        ),
        speculative_config=SimpleNamespace(draft_model_config=SimpleNamespace(is_moe=is_moe)),
    )
    return made


def size(made: Any, tokens: int, **given: bool) -> tuple[str, int, list[int] | None]:
    mode, padded, counts = made._determine_batch_execution_and_padding(tokens, **given)
    return mode.name, padded, None if counts is None else counts.tolist()


TOGETHER = ("PIECEWISE", AGREED, [AGREED, AGREED])


@pytest.mark.usefixtures("patched")
def test_after_a_vote_of_all_a_drafter_without_experts_has_its_own_size(proposers: Any, other: Other):
    made = drafter(proposers, DENSE)
    assert asks_engines(made)
    other.unpadded = -1
    assert size(made, 11) == TOGETHER
    assert not asks_engines(made)
    assert size(made, 11) == ("PIECEWISE", 16, [16, 16])
    assert size(made, 11, use_cudagraphs=False) == ("NONE", 11, [11, 11])
    assert other.received == [-1]


@pytest.mark.usefixtures("patched")
def test_an_engine_whose_plugin_is_off_keeps_all_asking(proposers: Any, other: Other):
    made = drafter(proposers, DENSE)
    assert [size(made, 11), size(made, 11)] == [TOGETHER, TOGETHER]
    assert asks_engines(made)
    assert other.received == [-1, 11]


@pytest.mark.usefixtures("patched")
@pytest.mark.parametrize(
    ("model", "given"),
    [(EXPERTS, {}), (DENSE, {"is_moe": True}), (DENSE, {"enable_elastic_ep": True})],
    ids=["experts by modules", "experts by configuration", "engines that may join"],
)
def test_a_drafter_that_needs_the_others_does_not_vote(
    proposers: Any, other: Other, model: torch.nn.Module, given: dict[str, bool]
):
    made = drafter(proposers, model, **given)
    other.unpadded = -1
    assert [size(made, 11), size(made, 11)] == [TOGETHER, TOGETHER]
    assert asks_engines(made)
    assert other.received == [11, 11]


def test_stock_asks_each_time(proposers: Any, other: Other):
    made = drafter(proposers, DENSE)
    other.unpadded = -1  # as an engine that votes, which stock does not notice
    assert [size(made, 11), size(made, 11)] == [TOGETHER, TOGETHER]
    assert asks_engines(made)
    assert other.received == [11, 11]


def test_one_engine_is_left_as_it_is(proposers: Any, other: Other):
    sizes = size(drafter(proposers, DENSE, engines=1), 11), size(drafter(proposers, EXPERTS, engines=1), 3)
    with applied("drafter-agreement"):
        found = size(drafter(proposers, DENSE, engines=1), 11), size(drafter(proposers, EXPERTS, engines=1), 3)
    assert found == sizes == (("PIECEWISE", 16, None), ("PIECEWISE", 8, None))
    assert other.received == []
