"""Which batches take tokens and indices from the device, on a runner with two functions of its own.

tests/releases compares vLLM's runners with stock's.
"""

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from vllm_async_spec.patching import temporarily
from vllm_async_spec.vllm_plugin.patches import carried_inputs

ROWS, DRAFTS = 4, 3


class Runner:
    """As much of vLLM's runner as the patch reads. Its functions count their calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.max_num_reqs = ROWS
        self.enable_prompt_embeds = False
        self.parallel_config = SimpleNamespace(pipeline_parallel_size=1)
        self.prev_positions = SimpleNamespace(np=np.arange(ROWS))
        self.input_ids = SimpleNamespace(gpu=torch.full((64,), -7, dtype=torch.int32))
        self.input_batch = SimpleNamespace(prev_sampled_token_ids=torch.arange(ROWS, dtype=torch.int32)[:, None] + 50)
        self._draft_token_ids: Any = torch.arange(ROWS * DRAFTS).view(ROWS, DRAFTS) + 100

    def _prepare_input_ids(self, scheduled: Any, requests: int, total: int, ends: Any) -> None:
        self.calls.append("tokens")

    def _calc_spec_decode_metadata(self, drafts: Any, ends: Any) -> Any:
        self.calls.append("indices")
        ends = torch.as_tensor(ends).long()
        counts = torch.as_tensor(drafts).long()
        sampled = [torch.arange(int(end - count) - 1, int(end)) for end, count in zip(ends, counts, strict=True)]
        firsts = (counts + 1).cumsum(0) - counts - 1
        wanted = [torch.arange(int(count)) + first for count, first in zip(counts, firsts, strict=True)]
        logits_indices, target_logits_indices = torch.cat(sampled), torch.cat(wanted)
        return SimpleNamespace(
            logits_indices=logits_indices,
            target_logits_indices=target_logits_indices,
            draft_token_ids=self.input_ids.gpu[logits_indices[target_logits_indices + 1]],
        )


@pytest.fixture
def runner_class() -> Iterator[type[Runner]]:
    with temporarily() as changes:
        carried_inputs._apply(changes, SimpleNamespace(GPUModelRunner=Runner))  # type: ignore[arg-type]
        yield Runner


def prepare(runner: Any, counts: Sequence[int], lengths: Sequence[int] | None = None) -> list[int]:
    """The tokens of a step in which each row has so many drafts and so many tokens, by default one more."""
    lengths = [count + 1 for count in counts] if lengths is None else lengths
    ends = np.cumsum(lengths, dtype=np.int32)
    drafts = {f"r{row}": [-1] * count for row, count in enumerate(counts) if count}
    scheduled = SimpleNamespace(scheduled_spec_decode_tokens=drafts)
    runner._prepare_input_ids(scheduled, len(counts), int(ends[-1]), ends)
    tokens: list[int] = runner.input_ids.gpu[: ends[-1]].tolist()
    return tokens


@pytest.mark.parametrize("rows", [1, 2, ROWS])
def test_a_batch_that_goes_on_takes_its_tokens_from_the_device(runner_class: Any, rows: int):
    runner = runner_class()
    tokens = prepare(runner, [DRAFTS] * rows)
    assert runner.calls == []
    drafts = runner._draft_token_ids.tolist()
    assert tokens == [token for row in range(rows) for token in (50 + row, *drafts[row])]


OTHERS: dict[str, tuple[dict[str, Any], list[int], list[int] | None]] = {
    "a row without drafts": ({}, [3, 0, 3], None),
    "a row without drafts beside as many tokens": ({}, [3, 0, 3], [4, 4, 4]),
    "fewer drafts than tokens, after a failed load of keys": ({}, [3, 2, 3], [4, 4, 4]),
    "fewer drafts for all": ({}, [2, 2, 2], None),
    "a prompt's chunk beside drafts": ({}, [3, 3, 0], [4, 4, 9]),
    "more tokens than drafts": ({}, [3, 3], [4, 5]),
    "rows that changed places": ({"prev_positions.np": np.array([1, 0, 2, 3])}, [3, 3], None),
    "a request that was not in the last step": ({"prev_positions.np": np.array([0, -1, 2, 3])}, [3, 3], None),
    "a row that moved up": ({"prev_positions.np": np.array([0, 2, 3, -1])}, [3, 3], None),
    "no sampled tokens on the device": ({"input_batch.prev_sampled_token_ids": None}, [3, 3], None),
    "drafts on the host": ({"_draft_token_ids": [[1, 2, 3], [4, 5, 6]]}, [3, 3], None),
    "no drafts": ({"_draft_token_ids": None}, [3, 3], None),
    "no drafts were made": ({"_draft_token_ids": torch.empty(ROWS, 0, dtype=torch.int64)}, [0, 0], None),
    "prompt embeddings": ({"enable_prompt_embeds": True}, [3, 3], None),
    "tokens of another rank": ({"parallel_config.pipeline_parallel_size": 2}, [3, 3], None),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_batches_run_vllms_function(runner_class: Any, name: str):
    changes, counts, lengths = OTHERS[name]
    runner = runner_class()
    prepare(runner, [DRAFTS] * ROWS)
    before = runner.input_ids.gpu.clone()
    for path, value in changes.items():
        *owners, last = path.split(".")
        setattr(functools.reduce(getattr, owners, runner), last, value)
    prepare(runner, counts, lengths)
    assert runner.calls == ["tokens"]
    assert torch.equal(runner.input_ids.gpu, before)


def test_the_number_of_drafts_may_change_from_step_to_step(runner_class: Any):
    """From 0.24 on the scheduler may choose it by the size of the batch."""
    runner = runner_class()
    for count in (3, 1, 2, 3):
        runner._draft_token_ids = torch.arange(ROWS * count).view(ROWS, count) + 10 * count
        tokens = prepare(runner, [count] * 3)
        assert tokens == [t for row in range(3) for t in (50 + row, *runner._draft_token_ids[row].tolist())]
    assert runner.calls == []


def indices(
    calculate: Callable[[Any, Any], Any], counts: Sequence[int], lengths: Sequence[int] | None = None
) -> tuple[list[int], list[int]]:
    drafts = np.array(counts, dtype=np.int32)
    made = calculate(drafts, np.cumsum(drafts + 1 if lengths is None else lengths, dtype=np.int32))
    return made.logits_indices.tolist(), made.draft_token_ids.tolist()


STEPS: list[tuple[list[int], list[int] | None]] = [
    ([3, 3], None),
    ([3, 3], None),
    ([3, 3], [4, 6]),
    ([3, 3], [5, 4]),
    ([3, 1], None),
    ([3, 3], None),
    ([3], None),
]


def test_kept_indices_are_those_that_vllm_would_make(runner_class: Any):
    runner, other, stock = runner_class(), runner_class(), Runner.__new__(Runner)
    plain = inspect.unwrap(Runner._calc_spec_decode_metadata)
    for number, (counts, lengths) in enumerate(step for step in STEPS for _ in range(3)):
        for each in (runner, other):  # the second runner has other tokens, and the batch of the step before
            each.input_ids.gpu = torch.arange(64, dtype=torch.int32) * (7 if each is runner else 11) + number
        indices(other._calc_spec_decode_metadata, *STEPS[number // 3 - 1])
        Runner.__init__(stock)
        stock.input_ids.gpu = runner.input_ids.gpu
        expected = indices(functools.partial(plain, stock), counts, lengths)
        assert indices(runner._calc_spec_decode_metadata, counts, lengths) == expected
    assert runner.calls == ["indices"] * 5  # two of STEPS are like the first


def test_few_batches_are_kept(runner_class: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(carried_inputs, "_MOST", 2)
    runner = runner_class()
    runner.input_ids.gpu = torch.arange(64, dtype=torch.int32)
    made = []
    for counts in ([3], [3, 3], [3], [3] * 3, [3, 3], [3], [3, 3]):
        before = len(runner.calls)
        indices(runner._calc_spec_decode_metadata, counts, None)
        made.append(len(runner.calls) > before)
    assert made == [True, True, False, True, False, True, True]  # the oldest goes


def test_the_metadata_of_a_step_stays_as_it_was(runner_class: Any):
    """The step before may still be on its way, and arguments are the runner's buffers."""
    runner, drafts, ends = runner_class(), np.array([3, 3], dtype=np.int32), np.array([4, 8], dtype=np.int32)
    runner.input_ids.gpu = torch.arange(64, dtype=torch.int32)
    made = [runner._calc_spec_decode_metadata(drafts, ends)]
    runner.input_ids.gpu = torch.arange(64, dtype=torch.int32) + 100
    made.append(runner._calc_spec_decode_metadata(drafts, ends))
    ends[:] = [5, 10]
    made.append(runner._calc_spec_decode_metadata(drafts, ends))
    assert runner.calls == ["indices"] * 2
    assert [each.draft_token_ids.tolist() for each in made] == [
        [1, 2, 3, 5, 6, 7],
        [101, 102, 103, 105, 106, 107],
        [102, 103, 104, 107, 108, 109],
    ]
