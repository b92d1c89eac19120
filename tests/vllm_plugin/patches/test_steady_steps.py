"""Which steps the kernel of steady batches prepares, on a runner with only what the patch reads.

tests/releases compares vLLM's runners with stock's.
"""

import functools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from vllm_async_spec.patching import temporarily
from vllm_async_spec.vllm_plugin.patches import steady_inputs

ROWS, DRAFTS, SIZE = 3, 2, 6
EACH = DRAFTS + 1


class Buffer:
    def __init__(self, size: int, dtype: torch.dtype = torch.int32) -> None:
        self.cpu, self.gpu = torch.zeros(size, dtype=dtype), torch.zeros(size, dtype=dtype)
        self.np = self.cpu.numpy()

    def copy_to_gpu(self, n: int | None = None) -> None:
        self.gpu[:n] = self.cpu[:n]


class Runner:
    """As much of vLLM's runner as the patch reads. Its functions count their calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.device = torch.device("cpu")
        self.use_async_spec_decode = True
        self.uses_mrope = self.supports_mm_inputs = self.enable_prompt_embeds = False
        self.uses_xdrope_dim, self.dcp_world_size = 0, 1
        self.lora_config: Any = None
        self.parallel_config = SimpleNamespace(pipeline_parallel_size=1, prefill_context_parallel_size=1)
        self.cache_config = SimpleNamespace(mamba_cache_mode="none")
        self.num_computed_tokens = torch.zeros(SIZE, dtype=torch.int32)
        self.seq_lens = torch.zeros(SIZE, dtype=torch.int32)
        self.positions = torch.zeros(99, dtype=torch.int64)
        self.optimistic_seq_lens_cpu = torch.zeros(SIZE, dtype=torch.int32)
        self.num_accepted_tokens, self.query_start_loc, self.input_ids = Buffer(SIZE), Buffer(SIZE + 1), Buffer(99)
        self.discard_request_mask, self.prev_num_draft_tokens = Buffer(SIZE, torch.bool), Buffer(SIZE)
        self.num_decode_draft_tokens, self.prev_positions = Buffer(SIZE), Buffer(SIZE, torch.int64)
        self.model_config = SimpleNamespace(is_hybrid=False)
        self.prev_num_draft_tokens.np[:ROWS] = DRAFTS
        self.valid_sampled_token_count_gpu: Any = torch.tensor([1, 3, 2], dtype=torch.int32)
        self._draft_token_ids: Any = torch.arange(ROWS * DRAFTS).view(ROWS, DRAFTS) + 100
        names = [f"r{row}" for row in range(ROWS)]
        computed = torch.full((SIZE,), 10, dtype=torch.int32)
        self.requests = {name: SimpleNamespace(num_tokens=13) for name in names}
        self.input_batch = SimpleNamespace(
            req_ids=names,
            prev_req_id_to_index={name: row for row, name in enumerate(names)},
            prev_sampled_token_ids=torch.arange(ROWS, dtype=torch.int32)[:, None] + 50,
            num_computed_tokens_cpu_tensor=computed,
            num_computed_tokens_cpu=computed.numpy(),
            block_table=SimpleNamespace(
                commit_block_table=lambda rows: self.calls.append(f"pages of {rows}"),
                compute_slot_mapping=lambda rows, starts, positions: self.calls.append(f"slots of {len(positions)}"),
            ),
        )

    def _prepare_inputs(self, scheduled: Any, tokens: Any) -> tuple[Any, ...]:
        self.calls.append("vLLM")
        return None, None, EACH

    def _dummy_run(self) -> None:
        self.calls.append("dummy")

    def _calc_spec_decode_metadata(self, drafts: Any, ends: Any) -> Any:
        self.calls.append(f"drafts {drafts.tolist()}, ends {ends.tolist()}")
        return SimpleNamespace(logits_indices="indices")


def step(drafts: list[int] | None = None) -> tuple[Any, Any]:
    """The scheduler's output and the tokens of each row, for rows with these drafts; all with all of them if None."""
    drafts = [DRAFTS] * ROWS if drafts is None else drafts
    wanted = {f"r{row}": [-1] * count for row, count in enumerate(drafts) if count}
    return SimpleNamespace(scheduled_spec_decode_tokens=wanted), np.array(drafts, dtype=np.int32) + 1


@pytest.fixture
def runner() -> Iterator[Any]:
    with temporarily() as changes:
        runner_class = type("Own", (Runner,), dict(vars(Runner)))
        steady_inputs._apply(changes, SimpleNamespace(GPUModelRunner=runner_class))  # type: ignore[arg-type]
        yield runner_class()


def test_a_step_like_the_one_before_is_prepared_by_the_kernel(runner: Any):
    runner._prepare_inputs(*step())
    made = runner._prepare_inputs(*step())
    assert runner.calls == ["vLLM", "pages of 3", "slots of 9", "drafts [2, 2, 2], ends [3, 6, 9]"]
    assert (made[0], made[2]) == ("indices", EACH)
    assert runner.num_computed_tokens.tolist() == [1, 3, 2, 0, 0, 0]
    assert runner.seq_lens.tolist() == [4, 6, 5, 0, 0, 0]
    assert runner.optimistic_seq_lens_cpu.tolist() == [13, 13, 13, 0, 0, 0]
    assert runner.query_start_loc.gpu.tolist() == [0, 3, 6, 9, 9, 9, 9]
    assert runner.positions[:9].tolist() == [1, 2, 3, 3, 4, 5, 2, 3, 4]
    assert runner.input_ids.gpu[:9].tolist() == [50, 100, 101, 51, 102, 103, 52, 104, 105]


def test_rows_that_moved_are_gathered_from_their_old_places(runner: Any):
    runner._prepare_inputs(*step())
    runner.num_computed_tokens[:ROWS] = torch.tensor([20, 30, 40])
    runner.input_batch.req_ids = ["r2", "r0"]
    runner.input_batch.prev_req_id_to_index.pop("r1")
    runner.discard_request_mask.np[:] = True
    scheduled, tokens = step([DRAFTS] * 2)
    scheduled.scheduled_spec_decode_tokens = dict.fromkeys(["r0", "r2"], [-1] * DRAFTS)
    assert runner._prepare_inputs(scheduled, tokens)[2] == EACH
    assert runner.calls == ["vLLM", "pages of 2", "slots of 6", "drafts [2, 2], ends [3, 6]"]
    assert runner.num_computed_tokens[:2].tolist() == [42, 21]
    assert runner.num_accepted_tokens.gpu.tolist() == [2, 1, 1, 1, 1, 1]
    assert runner.seq_lens.tolist() == [45, 24, 0, 0, 0, 0]
    assert runner.query_start_loc.np.tolist() == runner.query_start_loc.gpu.tolist() == [0, 3, 6, 6, 6, 6, 6]
    assert runner.num_decode_draft_tokens.gpu.tolist() == [2, 2, -1, -1, -1, -1]
    assert runner.optimistic_seq_lens_cpu.tolist() == [13, 13, 0, 0, 0, 0]
    assert not runner.discard_request_mask.np[:2].any()
    assert runner.positions[:6].tolist() == [42, 43, 44, 21, 22, 23]
    assert runner.input_ids.gpu[:6].tolist() == [52, 104, 105, 50, 100, 101]
    runner.input_batch.prev_req_id_to_index = {"r2": 0, "r0": 1}
    runner._prepare_inputs(scheduled, tokens)  # goes on, from the two rows
    assert runner.num_computed_tokens[:2].tolist() == [43, 24]


def test_a_row_that_had_a_prompt_is_where_the_host_says(runner: Any):
    runner._prepare_inputs(*step())
    runner.num_computed_tokens[:ROWS] = torch.tensor([20, 30, 40])
    runner.prev_num_draft_tokens.np[1] = 0
    runner._prepare_inputs(*step())
    assert runner.num_computed_tokens[:ROWS].tolist() == [21, 10, 42]
    assert runner.num_accepted_tokens.gpu[:ROWS].tolist() == [1, 1, 2]
    assert runner.seq_lens[:ROWS].tolist() == [24, 13, 45]


CHANGES: dict[str, tuple[str, Any]] = {
    "a row that is not known": ("input_batch.prev_req_id_to_index", {"r0": 0, "r2": 2}),
    "a row of another batch": ("input_batch.prev_req_id_to_index", {"r0": 0, "r1": 2, "r2": 3}),
    "no counts": ("valid_sampled_token_count_gpu", None),
    "drafts on the host": ("_draft_token_ids", [[1, 2]] * ROWS),
    "drafts of another number": ("_draft_token_ids", torch.zeros(ROWS, DRAFTS - 1, dtype=torch.int64)),
    "drafts of too few rows": ("_draft_token_ids", torch.zeros(ROWS - 1, DRAFTS, dtype=torch.int64)),
    "nothing sampled": ("input_batch.prev_sampled_token_ids", None),
    "nothing before": ("input_batch.prev_req_id_to_index", None),
}


@pytest.mark.parametrize("change", CHANGES)
def test_any_other_step_is_vllms(runner: Any, change: str):
    path, value = CHANGES[change]
    runner._prepare_inputs(*step())
    *owners, name = path.split(".")
    setattr(functools.reduce(getattr, owners, runner), name, value)
    runner._prepare_inputs(*step())
    assert runner.calls == ["vLLM", "vLLM"]


def test_a_prompt_that_goes_on_is_vllms(runner: Any):
    runner._prepare_inputs(*step())
    runner.prev_num_draft_tokens.np[0] = 0
    runner.requests["r0"].num_tokens = 14
    runner._prepare_inputs(*step())
    assert runner.calls == ["vLLM", "vLLM"]


def test_rows_of_a_hybrid_that_moved_are_vllms(runner: Any):
    runner._prepare_inputs(*step())
    runner.model_config.is_hybrid = True
    runner._prepare_inputs(*step())
    runner.input_batch.req_ids = ["r1", "r0", "r2"]
    runner._prepare_inputs(*step())
    assert [call for call in runner.calls if call == "vLLM"] == ["vLLM", "vLLM"]


def test_a_step_after_a_dummy_run_begins_from_all_rows(runner: Any):
    """The dummy run has overwritten the runner's buffers."""
    runner._prepare_inputs(*step())
    runner._dummy_run()
    runner.query_start_loc.np[:] = runner.num_decode_draft_tokens.np[:] = 77
    runner._prepare_inputs(*step())
    assert runner.calls[:3] == ["vLLM", "dummy", "pages of 3"]
    assert runner.query_start_loc.np.tolist() == [0, 3, 6, 9, 9, 9, 9]
    assert runner.num_decode_draft_tokens.np.tolist() == [2, 2, 2, -1, -1, -1]


@pytest.mark.parametrize("drafts", [[2, 2, 0], [2, 1, 2], [1, 1, 1]])
def test_a_step_of_another_shape_is_vllms(runner: Any, drafts: list[int]):
    runner._prepare_inputs(*step())
    runner._prepare_inputs(*step(drafts))
    assert runner.calls == ["vLLM", "vLLM"]


def test_a_step_after_one_whose_prompts_go_on_is_vllms(runner: Any):  # it has not met such rows yet
    runner.discard_request_mask.np[0] = True
    runner._prepare_inputs(*step())
    runner._prepare_inputs(*step())
    assert runner.calls == ["vLLM", "vLLM"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("use_async_spec_decode", False),
        ("uses_mrope", True),
        ("uses_xdrope_dim", 4),
        ("supports_mm_inputs", True),
        ("enable_prompt_embeds", True),
        ("lora_config", "adapters"),
        ("dcp_world_size", 2),
        ("parallel_config", SimpleNamespace(pipeline_parallel_size=2)),
        ("parallel_config", SimpleNamespace(pipeline_parallel_size=1, prefill_context_parallel_size=2)),
        ("cache_config", SimpleNamespace(mamba_cache_mode="align")),
        ("mamba_prev_last_scheduled_idx", "indices"),
    ],
)
def test_an_engine_whose_inputs_need_more_is_left_to_vllm(runner: Any, name: str, value: Any):
    setattr(runner, name, value)
    runner._prepare_inputs(*step())
    runner._prepare_inputs(*step())
    assert runner.calls == ["vLLM", "vLLM"]
