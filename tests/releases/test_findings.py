"""What docs/findings.md says of stock vLLM, shown with the real Python of a release; other nodes are named there."""

import importlib
import inspect
import json
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from command_line import COMMAND
from findings import check_context_parallel_lengths, lengths_of_a_late_device
from packaging.version import Version
from scheduled import Scheduled

from vllm_async_spec.compat import builders
from vllm_async_spec.compat.vllm_source import VllmSource

HAS_EXACT = ("0.12.0", "0.13.0", "0.18.1")
KEEPS_REJECTED = ("0.12.0", "0.13.0")


def test_context_parallel_kernels_are_told_of_rejected_drafts(release: str):
    if release in HAS_EXACT:
        pytest.skip(f"the runner of vLLM {release} waits for the accepted counts, and takes exact lengths")
    check_context_parallel_lengths("cpu")


def test_draft_slots_take_no_account_of_context_parallelism(release: str):
    """With two ranks a page holds 32 tokens of a request, 16 on each, so a table of 128 tokens has four pages."""
    utils = importlib.import_module("vllm.v1.spec_decode.utils")
    if not hasattr(utils, "compute_new_slot_mapping"):
        pytest.skip(f"vLLM {release} has no draft models")
    assert "total_cp_world_size" not in inspect.getsource(utils)
    table = torch.tensor([[5, 6, 7, 8], [1, 2, 3, 4]], dtype=torch.int32)
    starts = torch.tensor([0, 1, 2], dtype=torch.int32)
    batch = SimpleNamespace(block_table_tensor=table, query_start_loc=starts, naive_query_lens=starts.diff)

    def slots(*positions: int) -> list[int]:
        given = torch.tensor(positions)
        none = torch.zeros(2, dtype=torch.bool)
        found: torch.Tensor = utils.compute_new_slot_mapping(batch, given, none, 16, 0, 128)
        return found.tolist()

    assert slots(40, 40) == [7 * 16 + 8, 3 * 16 + 8], "token 40 is in the second page, 6 and 2"
    with pytest.raises(IndexError):  # on a GPU a device-side assertion, which ends the engine
        slots(40, 70)


def test_draft_steps_keep_rejected_tokens_in_their_lengths(release: str, loaded: VllmSource):
    proposer: Any = importlib.import_module("vllm.v1.spec_decode.eagle").EagleProposer
    step = proposer.propose
    if release not in KEEPS_REJECTED:
        assert "num_rejected_tokens_gpu" in inspect.signature(step).parameters
        return
    made = object.__new__(proposer)
    made.device = torch.device("cpu")
    told: list[str] = []
    loaded.on_kernel = lambda name, arguments, results: told.append(name)
    try:
        batch = builders.common_metadata([4, 4], [36, 103], host=True)
        drafts: Any = type("Drafts", (), {"cu_num_draft_tokens": torch.tensor([3, 6], dtype=torch.int32)})
        accepted = torch.tensor([1, 1], dtype=torch.int32)  # each request has its three drafts rejected
        drafted, *_ = made.prepare_inputs_padded(batch, drafts, accepted)
    finally:
        loaded.on_kernel = None
    assert told == ["eagle_prepare_inputs_padded_kernel"]  # it is given no lengths
    assert drafted.seq_lens.tolist() == [36, 103]  # the requests have 33 and 100 tokens
    # Nothing that follows can know better.
    assert "reject" not in inspect.getsource(step)


def test_draft_steps_of_a_synchronous_engine_write_lengths_that_are_yet_to_be_copied():
    from vllm.v1.attention.backends.utils import CommonAttentionMetadata
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    if "optimistic_seq_lens_cpu" not in inspect.getsource(GPUModelRunner):
        pytest.skip("its runner sends lengths; tests/releases/test_simulation.py shows it")
    if "_num_computed_tokens_cpu" not in CommonAttentionMetadata.__dataclass_fields__:
        pytest.skip("its draft steps are given nothing of the host's")
    sent, got = lengths_of_a_late_device(asynchronous=False)
    assert got == [each + 1 for each in sent]
    sent, got = lengths_of_a_late_device(asynchronous=True)
    assert got == sent


def test_flashinfer_with_context_parallelism_writes_into_lengths_that_all_layers_share(
    vllm_source: Path, release: str, tmp_path: Path
):
    result = tmp_path / "found.json"
    options = ["--vllm-source", str(vllm_source), "--backend", "FLASHINFER_DCP", "--json", str(result)]
    subprocess.run([*COMMAND, "compat", *options], capture_output=True, check=False)
    (found,) = json.loads(result.read_text())["backends"]
    exact = {
        case["case"]: build["changed"]
        for case in found["cases"]
        for build in case["builds"]
        if build["host"] == "exact lengths"
    }
    assert exact["decode"] == []
    name = "seq_lens_cpu" if release == "0.12.0" else "_seq_lens_cpu"
    assert exact["prefill with context"] == ([] if Version(release) >= Version("0.32") else [name])


@pytest.mark.parametrize("seed", range(3))
def test_the_scheduler_frees_a_windows_blocks_by_drafts_in_flight(release: str, seed: int):
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    engine = Scheduled(seed)
    engine.serve()
    assert engine.gaps == []
    assert len(engine.missing) > 50
    counts_in_flight = "num_in_flight_tokens" in KVCacheManager.allocate_slots.__code__.co_names
    assert (max(engine.missing) > 0) is not counts_in_flight


def test_the_scheduler_counts_wrong_what_is_in_flight_when_the_prefix_cache_is_reset(release: str):
    from vllm.v1.core.sched.scheduler import Scheduler

    drops_what_is_stale = "drop_stale_output" in Scheduler._preempt_request.__code__.co_varnames
    wrong = [each for each in map(reset, range(4)) if each is not None]
    assert (wrong == []) is drops_what_is_stale, wrong


def reset(seed: int) -> str | None:
    """What is wrong when the prefix cache is reset twice; some loads go right by luck."""
    engine = Scheduled(seed)
    try:
        engine.serve(reset_at=(6, 12))
    except (AssertionError, RuntimeError) as error:
        return repr(error)
    return f"tokens are lost of requests {engine.gaps}" if engine.gaps else None
