"""What docs/findings.md says of stock vLLM, on a GPU (`-m gpu`): a test passes where stock vLLM is wrong."""

import importlib
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import COMMAND
from findings import check_context_parallel_lengths
from findings_engine import DRAFTS, found, sliding

from vllm_async_spec.vllm_plugin.ledger import find_patch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]

BUSY = 200_000_000
"""Cycles that the device is kept busy for, a tenth of a second: as if a step were running."""


def compat(backend: str, tmp_path: Path) -> Any:
    result = tmp_path / "found.json"
    command = [*COMMAND, "compat", "--device", "cuda", "--backend", backend, "--json", str(result)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"VLLM_ASYNC_SPEC": "off"})
    if done.returncode == 2:
        pytest.skip(f"{backend} is not tried here: {found_failure(result) or done.stderr.strip()[-500:]}")
    assert result.is_file(), done.stderr[-2000:]
    (found,) = json.loads(result.read_text())["backends"]
    return found


def found_failure(result: Path) -> str | None:
    if not result.is_file():
        return None
    (found,) = json.loads(result.read_text())["backends"]
    return found["failure"] or next((case["not_run"] for case in found["cases"] if case["not_run"]), None)


def steps(found: Any, what: str) -> list[tuple[str, Any]]:
    cases = [case for case in found["cases"] if not case["capture"]]
    return [(case["case"], each) for case in cases for each in case[what] if each["realistic"]]


@pytest.mark.parametrize("backend", ["TRITON_MLA", "FLASHMLA", "FLASHMLA_SPARSE"])
def test_mla_prefill_path_attends_past_the_end_of_requests_with_drafts(backend: str, tmp_path: Path):
    found = compat(backend, tmp_path)
    builds = steps(found, "builds")
    if not any(build["host"] == "upper bound" for _, build in builds):
        pytest.skip("this release gives builders no upper bound, and MLA asks the device")
    cut = {
        case
        for case, build in builds
        for each in build["differences"]
        if each["judgement"] == "wrong" and "chunked_context" in each["field"]
    }
    assert cut
    if found["not_attended"] is not None:
        return  # the metadata is wrong, and no kernel was asked
    attended = {case: each for case, each in steps(found, "attended") if each["not_run"] is None}
    assert cut & attended.keys(), [each["not_run"] for _, each in steps(found, "attended")]
    wrong = {case for case, each in attended.items() if not each["right"]}
    assert wrong  # among thousands of keys three more are within the tolerance
    assert wrong <= cut


@pytest.mark.parametrize("backend", ["FLASHINFER", "CHUNKED_LOCAL"])
def test_it_waits_for_the_device_in_every_step(backend: str, tmp_path: Path):
    found = compat(backend, tmp_path)
    assert found["verdict"] in ("blocks", "exact"), found["verdict"]


def test_context_parallel_kernels_are_told_of_rejected_drafts():
    runner: Any = importlib.import_module("vllm.v1.worker.gpu_model_runner")
    if "optimistic_seq_lens_cpu" not in Path(runner.__file__).read_text():
        pytest.skip("the runner of this release waits for the accepted counts, and takes exact lengths")
    check_context_parallel_lengths("cuda")


def test_fast_prefill_reads_offsets_before_their_copy_arrives(monkeypatch: pytest.MonkeyPatch):
    """What the host reads is what was in the pinned memory before, while the device still works."""
    from vllm_async_spec.compat import builders

    utils: Any = importlib.import_module("vllm.v1.attention.backends.utils")
    batch = builders.common_metadata([4, 4, 30], [20, 33, 30])
    for name in ("query_start_loc", "seq_lens", "block_table_tensor", "slot_mapping"):
        setattr(batch, name, getattr(batch, name).cuda())
    batch.logits_indices_padded = torch.tensor([0, 1, 2, 3, 4, 5, 6, 7, 37], device="cuda")
    batch.num_logits_indices = 9
    if hasattr(batch, "max_logits_per_req"):
        batch.max_logits_per_req = 4
    # Compiles what it compiles. It is kept, or its pinned memory would serve again, with the truth in it.
    before = utils.make_kv_sharing_fast_prefill_common_attn_metadata(batch)
    torch.cuda.synchronize()
    truth = [0, 4, 8, 9]
    assert before.query_start_loc_cpu.tolist() == truth
    stale = torch.full((len(truth),), -1, dtype=torch.int32, pin_memory=True)
    del stale  # as an engine's pinned memory is full of other batches
    copy = torch.Tensor.to

    def after_a_busy_device(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        # Releases up to 0.27 have waited a moment before; what the device does in between is up to the engine.
        if tensor.is_cuda and kwargs.get("non_blocking"):
            torch.cuda._sleep(BUSY)
        return copy(tensor, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "to", after_a_busy_device)
    made = utils.make_kv_sharing_fast_prefill_common_attn_metadata(batch)
    at_once = made.query_start_loc_cpu.tolist()
    torch.cuda.synchronize()
    assert made.query_start_loc_cpu.tolist() == truth == made.query_start_loc.tolist()
    assert at_once != truth


def test_flashinfer_plans_over_a_plan_that_is_on_its_way():
    """The second plan is written into the pinned memory that the first is still being copied from."""
    flashinfer: Any = pytest.importorskip("flashinfer", reason="flashinfer-python is not installed")
    workspace = torch.zeros(128 << 20, dtype=torch.uint8, device="cuda")
    sizes = {"num_qo_heads": 8, "num_kv_heads": 2, "head_dim": 64, "page_size": 16, "q_data_type": torch.bfloat16}

    def plan(wrapper: Any, lengths: list[int]) -> None:
        pages = torch.tensor([0, *(-(-length // 16) for length in lengths)], dtype=torch.int32).cumsum(0).int()
        last = torch.tensor([(length - 1) % 16 + 1 for length in lengths], dtype=torch.int32)
        indices = torch.arange(int(pages[-1]), dtype=torch.int32, device="cuda")
        wrapper.plan(pages.pin_memory(), indices, last.pin_memory(), kv_data_type=torch.bfloat16, **sizes)

    def planned(first: list[int], second: list[int] | None) -> torch.Tensor:
        """What kernels between the two plans would read."""
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD")
        plan(wrapper, second or first)  # compiles
        wrapper._int_workspace_buffer.zero_()
        torch.cuda.synchronize()
        if second is not None:
            torch.cuda._sleep(BUSY)
        plan(wrapper, first)
        seen = wrapper._int_workspace_buffer.clone()
        if second is not None:
            plan(wrapper, second)
        torch.cuda.synchronize()
        return seen

    one, other = [33] * 4, [4000] * 4
    assert torch.equal(planned(one, None), planned(one, None)), "plans differ by themselves, and this test says nothing"
    assert not torch.equal(planned(one, other), planned(one, None))


MIN_TOKENS = """
import sys
from collections import Counter
from vllm import LLM, SamplingParams
from vllm_async_spec.demo.train import PROMPTS
model, draft, asynchronous = sys.argv[1], sys.argv[2], sys.argv[3] == "async"
drafts = {"method": "draft_model", "model": draft, "num_speculative_tokens": 3}
llm = LLM(model=model, speculative_config=drafts, async_scheduling=asynchronous, max_model_len=256,
          dtype="float16", gpu_memory_utilization=0.1, kv_cache_memory_bytes=1 << 30, enforce_eager=True)
free = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
# The commonest, so that the model, kept from each of them for long, takes one as soon as it may.
usual = [token for token, _ in Counter(token for out in free for token in out.outputs[0].token_ids).most_common(9)]
least = range(8, 32)  # a draft has to be rejected just before
asked = [(prompt, SamplingParams(temperature=0, max_tokens=40, min_tokens=least_tokens, stop_token_ids=usual))
         for prompt in PROMPTS for least_tokens in least]
found = llm.generate([prompt for prompt, _ in asked], [wanted for _, wanted in asked])
first = [out.outputs[0].token_ids[:wanted.min_tokens] for (_, wanted), out in zip(asked, found)]
print("EARLY", sum(bool(set(tokens) & set(usual)) for tokens in first), len(first))
"""


def test_min_tokens_is_lifted_early(gpu_models: Any):
    """Requests may stop at every token that they would choose, once they have enough; asynchronous, some do before."""
    vllm: Any = importlib.import_module("vllm")
    if not find_patch("min-tokens").covers(vllm.__version__):
        pytest.skip(f"vLLM {vllm.__version__} counts what it confirmed")
    environment = os.environ | {"VLLM_ASYNC_SPEC": "off", "VLLM_USE_V2_MODEL_RUNNER": "0"}

    def too_early(way: str) -> int:
        command = [sys.executable, "-c", MIN_TOKENS, str(gpu_models.target), str(gpu_models.draft), way]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        line = next((line for line in done.stdout.splitlines() if line.startswith("EARLY ")), None)
        assert line is not None, done.stderr[-2000:]
        print(way, line)
        return int(line.split()[1])

    assert too_early("sync") == 0
    assert too_early("async") > 0


def carried() -> bool:
    """Whether the host takes nothing off, and gives asynchronous draft steps no lengths of its own: from 0.19 on."""
    vllm: Any = importlib.import_module("vllm")
    return not find_patch("optimistic-runner").covers(vllm.__version__)


def different(told: Any, which: str) -> dict[int, int]:
    pairs = enumerate(zip(told["undisturbed"], told[which], strict=False))
    return {number: same(one, other) for number, (one, other) in pairs if one != other}


def same(one: list[int], other: list[int]) -> int:
    differ = (at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(differ, min(len(one), len(other)))


def unless_it_says_nothing(sync: Any, asynchronous: Any) -> None:
    """Undisturbed, both give the same tokens again; and disturbed, the synchronous engine does."""
    for name, told in (("synchronous", sync), ("asynchronous", asynchronous)):
        changed = different(told, "again")
        assert changed == {}, f"the {name} engine changes tokens by itself, and this test says nothing"
    assert sync["failed"] is None
    changed = different(sync, "disturbed")
    assert changed == {}, "the synchronous engine changes tokens too, and this test says nothing"


def test_rejections_are_taken_off_twice_after_a_pause(gpu_models: Any):
    """A paused engine takes what is in flight; the next step starts as many tokens too early as were rejected last."""
    if carried():
        pytest.skip("the runner of 0.19 and later takes nothing off on the host")
    state: Any = importlib.import_module("vllm.v1.core.sched.interface")
    if not hasattr(state, "PauseState"):
        pytest.skip("this release's engine core can't be paused with requests running, which 0.17 and later can")
    sync, asynchronous = (found("pause", (gpu_models.target, gpu_models.draft), way) for way in ("sync", "async"))
    unless_it_says_nothing(sync, asynchronous)
    assert all(step["given"] == step["sent"] for step in sync["steps"])
    wrong = [step for step in asynchronous["steps"] if step["given"] != step["sent"]]
    differ = len(different(asynchronous, "disturbed"))
    print(
        f"{len(wrong)} of {len(asynchronous['steps'])} first positions after a pause are wrong, and {differ} requests"
    )
    print(
        f"the engine failed: {asynchronous['failed']}; requests came early by themselves: {asynchronous['by_itself']}"
    )
    assert wrong
    assert all(step["given"] == step["sent"] - step["rejected"] for step in wrong), wrong
    assert asynchronous["failed"] or asynchronous["disturbed"] != asynchronous["undisturbed"]


@pytest.mark.parametrize("way", ["async", "sync"])
def test_draft_steps_write_lengths_that_the_device_has_yet_to_copy(gpu_models: Any, way: str):
    """A device that is a fifth of a second late gets lengths with the draft steps' additions."""
    metadata: Any = importlib.import_module("vllm.v1.attention.backends.utils").CommonAttentionMetadata
    if "_num_computed_tokens_cpu" not in metadata.__dataclass_fields__:
        pytest.skip("this release is not concerned: its draft steps write into nothing that the runner sends")
    seen = found("late", (gpu_models.target, gpu_models.draft), way)
    print(seen)
    right = way == "async" and carried()
    assert seen["got"] == [sent + (0 if right else DRAFTS - 1) for sent in seen["sent"]]


def test_the_scheduler_frees_keys_of_a_window_that_are_still_seen(gpu_models: Any, tmp_path: Path):
    """Blocks are freed by lengths in which drafts in flight count."""
    allocate: Any = importlib.import_module("vllm.v1.core.kv_cache_manager").KVCacheManager.allocate_slots
    if "num_in_flight_tokens" in allocate.__code__.co_names:
        pytest.skip("this release is not concerned: its scheduler frees blocks by the tokens that it has processed")
    given = sliding(gpu_models, tmp_path)
    sync, asynchronous = (found("window", given, way) for way in ("sync", "async"))
    assert max(sync["missing"]) == 0
    worst, steps = max(asynchronous["missing"]), sum(map(bool, asynchronous["missing"]))
    print(f"{steps} of {len(asynchronous['missing'])} steps of requests miss keys, up to {worst} in one")
    assert worst > 0


def test_a_reset_of_the_prefix_cache_loses_tokens(gpu_models: Any):
    """Requests that are preempted with drafts in flight get other tokens, or an assertion of the scheduler fails."""
    preempt: Any = importlib.import_module("vllm.v1.core.sched.scheduler").Scheduler._preempt_request
    if "drop_stale_output" in preempt.__code__.co_varnames:
        pytest.skip("this release is not concerned: its scheduler counts what is in flight when it preempts")
    sync, asynchronous = (found("reset", (gpu_models.target, gpu_models.draft), way) for way in ("sync", "async"))
    unless_it_says_nothing(sync, asynchronous)
    assert min(asynchronous["in_flight"]) > 0
    failed = asynchronous["failed"]
    print(f"{failed=}; first tokens that differ, by request: {different(asynchronous, 'disturbed')}")
    # An assertion of the scheduler, or the engine's own end here: 0.26 lets a request wait for ever.
    assert failed is None or failed.startswith(("AssertionError", "RuntimeError in serve")), failed
    assert asynchronous["disturbed"] != asynchronous["undisturbed"]
