"""The optimistic runner on a real vLLM release: each seam that it takes, called on CPU tensors without an engine."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from bare_runner import (
    DRAFTS,
    ROWS,
    TOKENS,
    make_input_batch,
    prepare,
    runner,
    runner_class,
    sample,
    schedule,
    upstream,
)

from vllm_async_spec import sync_report
from vllm_async_spec.kernels import device_inputs

__all__ = ["runner", "runner_class", "upstream"]  # fixtures


def test_the_runner_that_vllm_will_import_is_a_subclass(runner_class, upstream):
    assert issubclass(runner_class, upstream)
    assert runner_class is not upstream
    assert (runner_class.__module__, runner_class.__qualname__) == (upstream.__module__, upstream.__qualname__)


def test_no_function_of_upstreams_is_pasted(runner_class, upstream):
    ours = runner_class.__mro__[: runner_class.__mro__.index(upstream)]
    replaced = {name for each in ours for name in vars(each) if name in dir(upstream) and not name.startswith("__")}
    assert len(replaced) >= 6
    for name in (*replaced, "__init__"):
        assert "super" in getattr(runner_class, name).__code__.co_names, name


def test_cascade_attention_is_off(runner):
    assert runner.cascade_attn_enabled is False


def test_vllms_warm_up_compiles_the_kernel_and_changes_nothing(runner, upstream, monkeypatch):
    """While vLLM profiles its memory there is no KV cache yet, and nothing to settle."""
    monkeypatch.setattr(upstream, "_dummy_sampler_run", lambda self, hidden_states: hidden_states)
    runner._progress, groups, runner.attn_groups = None, runner.attn_groups, []
    assert runner._dummy_sampler_run("logits") == "logits"
    assert runner._progress is None
    runner.attn_groups = groups
    launched = []
    kernel = device_inputs.correct_inputs_reference
    monkeypatch.setattr(
        device_inputs, "correct_inputs_reference", lambda *given: (launched.append(given), kernel(*given))
    )
    runner._dummy_sampler_run("logits")
    assert len(launched) == 1
    assert not any(runner.seq_lens.gpu.tolist() + runner.positions.gpu.tolist())
    settled = runner._progress
    runner._settle()
    assert runner._progress is settled


def test_an_optimistic_step_asks_the_device_for_nothing(runner, monkeypatch):
    prepare(runner, ["a", "b"], [32, 10], [4, 6], [3, 0])
    sample(runner, [2, 1], monkeypatch)
    schedule(runner, a=(36, 5))
    assert runner._get_valid_sampled_token_count() == [4, 1]
    assert runner.valid_sampled_token_count_event.waits == 0
    assert (sync_report().count, sync_report().fallbacks) == (0, {})
    assert runner.valid_sampled_token_count_cpu.tolist() == [0] * ROWS, "nobody reads it, so nothing is copied"
    assert runner.input_batch.prev_sampled_token_ids.tolist() == [[0], [1]]


TOKENS_OF_STEPS = {
    "all go on": (["a", "b", "c"], [4, 4, 4], [3, 3, 3], False),
    "rows move": (["c", "a", "b"], [4, 4, 4], [3, 3, 3], False),
    "fewer drafts": (["a", "b"], [2, 1], [1, 0], False),
    "one prefills": (["new", "b", "a"], [7, 4, 4], [0, 3, 3], True),
    "one has drafts of the host's": (["b", "new"], [4, 4], [3, 3], True),
    "all are new": (["x", "y"], [5, 9], [0, 0], True),
}


@pytest.mark.parametrize("step", TOKENS_OF_STEPS)
def test_tokens_of_the_last_step_are_where_vllm_puts_them(runner, upstream, monkeypatch, step):
    """And the host's tokens are sent where vLLM sends them."""
    names, tokens, drafts, sent = TOKENS_OF_STEPS[step]
    prepare(runner, ["a", "b", "c"], [32, 10, 50], [4, 4, 4], [3, 3, 3])
    sample(runner, [2, 1, 4], monkeypatch)
    runner._draft_token_ids = torch.arange(3 * DRAFTS).view(3, DRAFTS) + 700
    vars(runner).update(enable_prompt_embeds=False, pin_memory=False)
    runner.input_batch.req_ids = names
    runner.input_batch.req_id_to_index = {name: row for row, name in enumerate(names)}
    schedule = SimpleNamespace(
        scheduled_spec_decode_tokens={name: [-1] * count for name, count in zip(names, drafts, strict=True) if count}
    )
    ends, copies = np.cumsum(tokens), []
    copy_to_gpu = runner.input_ids.copy_to_gpu
    runner.input_ids.copy_to_gpu = lambda count: (copies.append(count), copy_to_gpu(count))
    runner.input_ids.cpu[:] = torch.arange(TOKENS)
    found = {}
    for way in ("wanted", "got"):
        runner.input_ids.gpu.fill_(-5)
        (upstream if way == "wanted" else type(runner))._prepare_input_ids(runner, schedule, int(ends[-1]), ends)
        if way == "got":
            metadata = prepare(runner, names, [40] * len(names), tokens, drafts)
        found[way] = runner.input_ids.gpu.tolist()
    assert found["got"] == found["wanted"]
    assert -5 not in found["got"][: ends[-1]]
    assert copies == [ends[-1]] * 2 * sent
    if metadata is not None:
        places = [at for end, count in zip(ends, drafts, strict=True) for at in range(end - count, end)]
        assert metadata.draft_token_ids.tolist() == [found["wanted"][at] for at in places]


def test_block_tables_that_are_made_anew_are_taken(runner, monkeypatch):
    """The kernel is given addresses, so one of a table that is gone would be written to."""
    prepare(runner, ["a"], [32], [4], [3])
    sample(runner, [2], monkeypatch)
    old = runner.input_batch.block_table.block_tables[0].slot_mapping.gpu
    runner.input_batch.block_table = make_input_batch().block_table
    table = runner.input_batch.block_table.block_tables[0]
    table.block_table.gpu[:] = 7
    prepare(runner, ["a"], [36], [1], [0])
    assert table.slot_mapping.gpu[0] == 7 * 16 + 2
    assert old.tolist() == [0] * TOKENS


@pytest.mark.gpu
@pytest.mark.parametrize("guarded", [True, False])
def test_a_late_device_gets_the_lengths_that_were_sent(runner, upstream, monkeypatch, guarded):
    """Draft steps add to the pinned lengths while a late device has yet to copy them."""
    from vllm.v1.utils import CpuGpuBuffer

    lengths = CpuGpuBuffer(ROWS, dtype=torch.int32, device=torch.device("cuda"), pin_memory=True)
    made = SimpleNamespace(_seq_lens_cpu=lengths.cpu[:2], _num_computed_tokens_cpu=None)
    monkeypatch.setattr(upstream, "_build_attention_metadata", lambda self, **given: ({}, made))
    lengths.np[:2] = 40, 50
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)
    lengths.copy_to_gpu()
    _, drafting = (runner if guarded else super(type(runner), runner))._build_attention_metadata(use_spec_decode=False)
    drafting._seq_lens_cpu += 1
    assert (lengths.gpu[:2].tolist() == [40, 50]) is guarded


def test_indices_of_drafts_are_made_once_for_equal_batches(runner, upstream, monkeypatch):
    copies: list[int] = []
    from_numpy = torch.from_numpy
    monkeypatch.setattr(torch, "from_numpy", lambda array: copies.append(1) or from_numpy(array))
    batches = [([3, 0, 2], [4, 9, 12]), ([3, 0, 2], [4, 9, 12]), ([3, 1, 2], [4, 9, 12]), ([3, 1, 2], [4, 10, 13])]
    made_new = []
    for drafts, ends in batches:
        given = np.array(drafts, dtype=np.int32), np.array(ends)
        before = len(copies)
        got = runner._calc_spec_decode_metadata(*given)
        made_new.append(len(copies) > before)
        wanted = upstream._calc_spec_decode_metadata(runner, *given)
        assert got.num_draft_tokens == wanted.num_draft_tokens
        assert got.max_spec_len == wanted.max_spec_len
        for name, value in vars(wanted).items():
            if isinstance(value, torch.Tensor) and name != "draft_token_ids":  # these are written later
                assert getattr(got, name).tolist() == value.tolist(), name
        assert runner._num_drafts is given[0]
    assert made_new == [True, False, True, True]
