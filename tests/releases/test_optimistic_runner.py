"""The optimistic runner on a real vLLM release: each seam that it takes, called on CPU tensors without an engine."""

from __future__ import annotations

import contextlib
import importlib
import inspect
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from undone import applied

from vllm_async_spec import reset_sync_report, sync_report
from vllm_async_spec.compat.backends import backend_subject
from vllm_async_spec.compat.builder_inputs import AbsentError
from vllm_async_spec.compat.cases import CASES, Host
from vllm_async_spec.compat.check import check
from vllm_async_spec.compat.simulated_device import SimulatedDevice
from vllm_async_spec.kernels import device_inputs
from vllm_async_spec.vllm_plugin.ledger import load_ledger
from vllm_async_spec.vllm_plugin.patches.exact_counts import DEVICE_LENGTHS, always_needed, needed_by

SPEC = next(spec for spec in load_ledger() if spec.name == "optimistic-runner")
ROWS, TOKENS, DRAFTS = 8, 64, 3
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def upstream(release):
    """The release's own runner class; the tests of a release that the patch is not for are skipped."""
    if release not in SPEC.releases:
        pytest.skip(f"the patch is not for {release}")
    return importlib.import_module("vllm.v1.worker.gpu_model_runner").GPUModelRunner


@pytest.fixture
def runner_class(upstream):
    """What the patch makes of it, while the patch is applied."""
    reset_sync_report()
    with applied("optimistic-runner"):
        yield importlib.import_module("vllm.v1.worker.gpu_model_runner").GPUModelRunner


class Event:
    """An event that says how often it was waited for."""

    def __init__(self) -> None:
        self.waits = 0

    def synchronize(self) -> None:
        self.waits += 1

    def query(self) -> bool:
        return True

    def record(self) -> None:
        pass


def buffer(*shape: int, dtype: torch.dtype) -> Any:
    from vllm.v1.utils import CpuGpuBuffer

    return CpuGpuBuffer(*shape, dtype=dtype, device=CPU, pin_memory=False)


def make_input_batch() -> Any:
    """What the seams read of an input batch; no request has anything that needs exact counts."""
    table = SimpleNamespace(
        block_table=buffer(ROWS, 16, dtype=torch.int32), block_size=16, slot_mapping=buffer(TOKENS, dtype=torch.int64)
    )
    return SimpleNamespace(
        prev_sampled_token_ids=None,
        prev_req_id_to_index=None,
        req_ids=[],
        num_reqs=0,
        num_computed_tokens_cpu=np.zeros(ROWS, dtype=np.int32),
        num_prompt_tokens=np.zeros(ROWS, dtype=np.int32),
        num_tokens_no_spec=np.zeros(ROWS, dtype=np.int32),
        block_table=SimpleNamespace(block_tables=[table]),
        no_penalties=True,
        bad_words_token_ids={},
        sampling_metadata=SimpleNamespace(output_token_ids=[]),
        logitsprocs=SimpleNamespace(all=[]),
    )


def group(name: str = "FLASH_ATTN", spec: str = "FullAttentionSpec", builder: Any = None) -> Any:
    """An attention group of a backend by that name."""
    return SimpleNamespace(
        backend=SimpleNamespace(get_name=lambda: name),
        kv_cache_spec=type(spec, (), {})(),
        metadata_builders=[builder or made_by("vllm.v1.attention.backends.any")],
    )


def made_by(module: str, **attributes: Any) -> Any:
    """A metadata builder that this module defines."""
    return type("Builder", (), {"__module__": module, **attributes})()


def settings() -> dict[str, Any]:
    """The attributes that say what a runner is for: EAGLE, one GPU, FlashAttention."""
    return {
        "parallel_config": SimpleNamespace(
            pipeline_parallel_size=1, prefill_context_parallel_size=1, use_ubatching=False
        ),
        "dcp_world_size": 1,
        "model_config": SimpleNamespace(is_hybrid=False),
        "speculative_config": SimpleNamespace(use_ngram_gpu=lambda: False),
        "is_multimodal_pruning_enabled": False,
        "enable_prompt_embeds": False,
        "attn_groups": [[group()]],
        "drafter": SimpleNamespace(backup_next_token_ids=buffer(ROWS, dtype=torch.int32)),
    }


@pytest.fixture
def runner(runner_class):
    """A runner without a model, whose first step is prepared."""
    made = object.__new__(runner_class)
    vars(made).update(
        settings(),
        device=CPU,
        max_num_reqs=ROWS,
        max_num_tokens=TOKENS,
        num_spec_tokens=DRAFTS,
        _draft_token_ids=None,
        cascade_attn_enabled=True,
        supports_mm_inputs=False,
        uses_mrope=False,
        uses_xdrope_dim=0,
        requests={},
        input_batch=make_input_batch(),
        input_ids=buffer(TOKENS, dtype=torch.int32),
        positions=buffer(TOKENS, dtype=torch.int64),
        seq_lens=buffer(ROWS, dtype=torch.int32),
        query_start_loc=buffer(ROWS + 1, dtype=torch.int32),
        arange_np=np.arange(TOKENS),
        prepare_inputs_event=Event(),
        valid_sampled_token_count_event=Event(),
        valid_sampled_token_count_cpu=torch.zeros(ROWS, dtype=torch.int64),
        _progress=None,
        _always_exact=None,
        _exact=None,
        _schedule=None,
        _num_drafts=None,
        _indices=None,
    )
    made._become_optimistic()
    return made


def prepare(runner: Any, names: list[str], computed: list[int], tokens: list[int], drafts: list[int]) -> Any:
    """What `_prepare_inputs` does of a step once vLLM has sent its values."""
    batch = runner.input_batch
    batch.req_ids, batch.num_reqs = names, len(names)
    batch.req_id_to_index = {name: row for row, name in enumerate(names)}
    batch.num_computed_tokens_cpu[: len(names)] = computed
    runner.query_start_loc.gpu[1 : len(names) + 1] = torch.tensor(tokens).cumsum(0)
    runner.seq_lens.gpu[: len(names)] = torch.tensor(computed) + torch.tensor(tokens)
    runner._num_drafts = np.array(drafts, dtype=np.int32) if any(drafts) else None
    metadata = SimpleNamespace(draft_token_ids=torch.zeros(sum(drafts), dtype=torch.int32)) if any(drafts) else None
    runner._correct_inputs(metadata)
    return metadata


def sample(runner: Any, counts: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """What the drafter's first part does: it hands over the next tokens and the counts."""
    stream = SimpleNamespace(wait_stream=lambda other: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda given: contextlib.nullcontext())
    runner.valid_sampled_token_count_copy_stream = stream
    runner._copy_valid_sampled_token_count(
        torch.arange(len(counts), dtype=torch.int32), torch.tensor(counts, dtype=torch.int32)
    )
    runner.input_batch.prev_req_id_to_index = {name: row for row, name in enumerate(runner.input_batch.req_ids)}


def schedule(runner: Any, **cached: tuple[int, int]) -> None:
    """The scheduler's next output: by request, computed tokens and output tokens."""
    runner._schedule = SimpleNamespace(
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(cached),
            num_computed_tokens=[computed for computed, _ in cached.values()],
            num_output_tokens=[outputs for _, outputs in cached.values()],
        )
    )


def test_the_runner_that_vllm_will_import_is_a_subclass(runner_class, upstream):
    assert issubclass(runner_class, upstream)
    assert runner_class is not upstream
    assert (runner_class.__module__, runner_class.__qualname__) == (upstream.__module__, upstream.__qualname__)


def test_no_function_of_upstreams_is_pasted(runner_class, upstream):
    """Every function that the subclass replaces calls the one that it replaces."""
    ours = runner_class.__mro__[: runner_class.__mro__.index(upstream)]
    replaced = {name for each in ours for name in vars(each) if name in dir(upstream) and not name.startswith("__")}
    assert len(replaced) >= 6
    for name in (*replaced, "__init__"):
        assert "super" in getattr(runner_class, name).__code__.co_names, name


def test_cascade_attention_is_off(runner):
    assert runner.cascade_attn_enabled is False


def test_vllms_warm_up_compiles_the_kernel_and_changes_nothing(runner, upstream, monkeypatch):
    """No request waits for it. While vLLM profiles its memory there is no KV cache yet, and nothing to settle."""
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


def test_the_next_step_is_corrected_on_the_device(runner, monkeypatch):
    prepare(runner, ["a", "b"], [32, 10], [4, 6], [3, 0])
    sample(runner, [2, 1], monkeypatch)
    table = runner.input_batch.block_table.block_tables[0]
    table.block_table.gpu[:] = torch.arange(ROWS * 16).view(ROWS, 16)
    prepare(runner, ["b", "a"], [16, 36], [1, 4], [0, 3])
    assert runner.seq_lens.gpu[:2].tolist() == [17, 34 + 4]
    assert runner.positions.gpu[1:5].tolist() == [34, 35, 36, 37]
    assert table.slot_mapping.gpu[1:5].tolist() == [(16 + 2) * 16 + at for at in (2, 3, 4, 5)]


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


def test_the_drafters_pinned_buffer_is_another_each_step(runner, monkeypatch):
    seen = set()
    for _ in range(3):
        prepare(runner, ["a"], [32], [4], [3])
        seen.add(runner.drafter.backup_next_token_ids.cpu.data_ptr())
        sample(runner, [2], monkeypatch)
    assert len(seen) == 3


@pytest.mark.parametrize("processed", [False, True], ids=["in flight", "already processed"])
def test_an_exact_step_waits_once_and_puts_the_host_right(runner, monkeypatch, processed):
    """Whether or not the engine has seen the result of the step, vLLM's arithmetic comes to the exact number."""
    prepare(runner, ["a"], [28], [4], [3])
    sample(runner, [1], monkeypatch)  # an optimistic step: of its three drafts none is accepted
    runner.input_batch.no_penalties = False
    prepare(runner, ["a"], [32], [4], [3])  # 29 on the device
    sample(runner, [3], monkeypatch)  # 32 now
    # Ten outputs were known before both steps. Of the first step four placeholders are left where one token was given.
    request = SimpleNamespace(prev_num_draft_len=DRAFTS, output_token_ids=[*range(10), -1, -1, -1, -1, -1])
    runner.requests["a"] = request
    batch = runner.input_batch
    batch.num_prompt_tokens[0], batch.num_tokens_no_spec[0] = 20, 20 + 15  # as the optimistic step has left it
    schedule(runner, a=(32, 14) if processed else (33, 15))
    (count,) = runner._get_valid_sampled_token_count()
    assert runner.valid_sampled_token_count_event.waits == 1
    assert sync_report().fallbacks == {"penalties": 1}
    assert [(site.what, site.kind.value, site.count) for site in sync_report().sites] == [
        ("accepted counts", "event", 1)
    ]
    # What follows is `_update_states`.
    computed, outputs = (32, 14) if processed else (33, 15)
    request.output_token_ids.extend([-1] * (count - 1))
    del request.output_token_ids[outputs:]
    assert computed - (DRAFTS - (count - 1)) == 32
    assert request.output_token_ids == [*range(10), -1, -1, -1, -1]
    assert batch.num_tokens_no_spec[0] == 20 + 12, "without the two that are accepted, which vLLM never adds here"


def test_after_an_exact_step_the_next_is_optimistic_again(runner, monkeypatch):
    runner.input_batch.bad_words_token_ids = {0: [[1]]}
    prepare(runner, ["a"], [32], [4], [3])
    sample(runner, [2], monkeypatch)
    assert runner.valid_sampled_token_count_cpu[0] == 2
    runner.input_batch.bad_words_token_ids = {}
    prepare(runner, ["a"], [34], [4], [3])
    sample(runner, [4], monkeypatch)
    assert runner._get_valid_sampled_token_count() == [4]
    assert runner.valid_sampled_token_count_event.waits == 0
    prepare(runner, ["a"], [38], [4], [3])
    assert runner.seq_lens.gpu[0] == 42


def test_a_batch_without_drafts_is_not_waited_for(runner, monkeypatch):
    runner.input_batch.no_penalties = False
    prepare(runner, ["a"], [0], [32], [0])
    sample(runner, [1], monkeypatch)
    assert runner._get_valid_sampled_token_count() == [1]
    assert runner.valid_sampled_token_count_event.waits == 0


def test_a_runner_that_is_always_exact_waits_as_vllm_does_and_says_why(runner, monkeypatch):
    runner._progress, runner._always_exact = None, "attention backend FLASHINFER"
    sample(runner, [2], monkeypatch)
    assert runner._get_valid_sampled_token_count() == [2]
    assert runner.valid_sampled_token_count_event.waits == 1
    assert sync_report().fallbacks == {"attention backend FLASHINFER": 1}


def test_without_asynchronous_scheduling_nothing_is_counted(runner):
    runner.valid_sampled_token_count_event = None
    assert runner._get_valid_sampled_token_count() == []
    assert (sync_report().count, sync_report().fallbacks) == (0, {})


@pytest.mark.parametrize("drafted", [True, False])
def test_draft_steps_do_not_count_in_the_runners_own_lengths(runner, upstream, monkeypatch, drafted):
    """Where no draft was verified they add to host lengths in place; where one was, they forget them."""
    made = SimpleNamespace(_seq_lens_cpu=runner.seq_lens.cpu[:2], _num_computed_tokens_cpu=runner.positions.cpu[:2])
    monkeypatch.setattr(upstream, "_build_attention_metadata", lambda self, **given: ({}, made))
    _, drafting = runner._build_attention_metadata(use_spec_decode=drafted)
    drafting._seq_lens_cpu += 1
    drafting._num_computed_tokens_cpu += 1
    assert runner.seq_lens.cpu[:2].tolist() == [int(drafted)] * 2
    assert runner.positions.cpu[:2].tolist() == [int(drafted)] * 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("guarded", [True, False])
def test_a_late_device_gets_the_lengths_that_were_sent(runner, upstream, monkeypatch, guarded):
    """Draft steps add to the pinned lengths while a late device has yet to copy them, unless they have their own."""
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


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"attn_groups": [[group("TRITON_ATTN"), group("FLASH_ATTN", "SlidingWindowSpec")]]}, None),
        ({"attn_groups": [[group(), group("FLASHINFER")]]}, "attention backend FLASHINFER"),
        (
            {"attn_groups": [[group(spec="ChunkedLocalAttentionSpec")]]},
            "attention backend FLASH_ATTN with ChunkedLocalAttentionSpec",
        ),
        (
            {
                "attn_groups": [
                    [group(spec="ChunkedLocalAttentionSpec", builder=made_by("vllm.x", cuts_on_device=True))]
                ]
            },
            None,
        ),
        (
            {"attn_groups": [[group(), group(builder=made_by("a_plugin.backend"))]]},
            "attention backend FLASH_ATTN with a_plugin.backend.Builder",
        ),
        ({"dcp_world_size": 2}, "context parallelism"),
        ({"model_config": SimpleNamespace(is_hybrid=True)}, "hybrid model"),
        ({"speculative_config": SimpleNamespace(use_ngram_gpu=lambda: True)}, "n-gram drafts on the GPU"),
        ({"is_multimodal_pruning_enabled": True}, "multimodal pruning"),
        ({"enable_prompt_embeds": True}, "prompt embeddings"),
        ({"drafter": SimpleNamespace()}, "drafter"),
    ],
)
def test_who_always_needs_exact_counts(change, reason):
    assert always_needed(SimpleNamespace(**(settings() | change))) == reason


@pytest.mark.parametrize("name", ["pipeline_parallel_size", "prefill_context_parallel_size", "use_ubatching"])
def test_who_always_needs_exact_counts_by_parallelism(name):
    given = settings()
    setattr(given["parallel_config"], name, 2)
    assert always_needed(SimpleNamespace(**given)) in ("pipeline parallelism", "context parallelism", "micro-batches")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"no_penalties": False}, "penalties"),
        ({"bad_words_token_ids": {0: [[4]]}}, "bad words"),
        ({"sampling_metadata": SimpleNamespace(output_token_ids=[[1]])}, "logits processors"),
        ({"logitsprocs": SimpleNamespace(all=[SimpleNamespace(min_toks={0: (3, [], set())})])}, "min_tokens"),
        ({"logitsprocs": SimpleNamespace(all=[SimpleNamespace(min_toks={})])}, None),
    ],
)
def test_which_batches_need_exact_counts(change, reason):
    assert needed_by(SimpleNamespace(**(vars(make_input_batch()) | change))) == reason


def test_the_names_that_decide_are_those_of_this_release(upstream):
    """A name that a release does not have would silently make every batch optimistic, or every backend exact."""
    from vllm.v1.sample.logits_processor.builtin import MinTokensLogitsProcessor
    from vllm.v1.worker import gpu_input_batch

    interface = importlib.import_module("vllm.v1.kv_cache_interface")
    for name in ("FullAttentionSpec", "SlidingWindowSpec", "MLAAttentionSpec", "UniformTypeKVCacheSpecs"):
        assert hasattr(interface, name)
    assert isinstance(gpu_input_batch.InputBatch.no_penalties, property)
    assert "min_toks" in MinTokensLogitsProcessor.__init__.__code__.co_names
    eagle = importlib.import_module("vllm.v1.spec_decode.eagle")
    assert "self.backup_next_token_ids" in inspect.getsource(eagle.EagleProposer.__mro__[-2].__init__)


BATCHES = ("spec K + 1", "non-uniform spec", "mixed", "page boundary", "draft step 2", "draft step 3")


@pytest.fixture(scope="module")
def simulated(loaded):
    device = SimulatedDevice()
    loaded.on_kernel = device.kernel_did_not_run
    yield device
    loaded.on_kernel = None


@pytest.mark.parametrize("name", [*sorted(DEVICE_LENGTHS), "FLASHINFER"])
def test_a_backend_that_is_named_builds_the_same_from_a_bound_and_drafts_without_a_wait(upstream, simulated, name):
    """Its builder is told a bound where it is used to exact lengths, and in draft steps nothing. FlashInfer's fails."""
    try:
        result = check(backend_subject(name, simulated), simulated, cases=[c for c in CASES if c.name in BATCHES])
    except AbsentError as error:
        pytest.skip(str(error))
    if result.failure is not None:
        pytest.skip(f"{name} can't be made here: {result.failure}")
    ran = [case for case in result.cases if case.not_run is None]
    right = all(not case.build(Host.BOUND).wrong and case.build(Host.BOUND).failure is None for case in ran)
    drafting = [case for case in ran if case.case.startswith("draft step")]
    waits = [wait for case in drafting for wait in case.build(Host.ABSENT).waits]
    assert len(drafting) == 2
    if name == "FLASHINFER":
        assert waits
    else:
        assert (right, waits) == (True, [])
