"""The verdicts of the release's own builders, held to what reading its source says of the same lines."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from packaging.version import Version

from vllm_async_spec.compat.backends import BACKENDS, backend_subject
from vllm_async_spec.compat.builder_inputs import AbsentError
from vllm_async_spec.compat.cases import CASES, Case, Host
from vllm_async_spec.compat.check import build_batch, check
from vllm_async_spec.compat.model_shapes import MODELS, THIRD_PARTY
from vllm_async_spec.compat.results import BackendResult, Need
from vllm_async_spec.compat.simulated_device import SimulatedDevice
from vllm_async_spec.compat.suite import run
from vllm_async_spec.compat.vllm_source import VllmSource, loaded_source

# The verdict, and a line that is named: of 0.12.0, 0.13.0, 0.18.1, 0.26.0 and 0.32.0.
EXPECTED: dict[str, tuple[str, ...]] = {
    "FLASH_ATTN": ("none",) * 5,
    "TRITON_ATTN": ("none",) * 5,
    "LINEAR": ("none",) * 5,
    "FLASH_ATTN_FA2": ("none",) * 5,
    "FLASH_ATTN_DCP": (
        "blocks: utils.py:1130",
        "blocks: utils.py:1193",
        "blocks: utils.py:805",
        "blocks: utils.py:909",
        "none",
    ),
    "INDEXER": (
        "blocks: mla/indexer.py:202",
        "blocks: mla/indexer.py:175",
        "blocks: mla/indexer.py:191",
        "prefill rows",
        "prefill rows",
    ),
    "FLASHMLA_SPARSE": (
        "none",
        "none",
        "none",
        "exact: chunked_context.cu_seq_lens",
        "exact: chunked_context.context_lens",
    ),
    "CPU_ATTN": ("none",) * 5,
    "TRITON_MLA": (
        "exact: mla/common.py:773",
        "exact: mla/common.py:776",
        "blocks: mla_attention.py:1735",
        "exact",
        "exact",
    ),
    "MAMBA2": (
        "blocks: mamba2_attn.py:208",
        "blocks: mamba2_attn.py:207",
        "blocks: mamba2_attn.py:147",
        "blocks: mamba2_attn.py:154",
        "prefill rows",
    ),
    "GDN": (
        "blocks: gdn_attn.py:146",
        "blocks: gdn_attn.py:146",
        "blocks: gdn_attn.py:302",
        "none",
        "prefill rows",
    ),
    "CHUNKED_LOCAL": (
        "blocks: utils.py:571",
        "blocks: utils.py:604",
        "blocks: utils.py:225",
        "exact: utils.py:283",
        "blocks: utils.py:517",
    ),
    "FAST_PREFILL": (
        "blocks: utils.py:745",
        "blocks: utils.py:777",
        "blocks: utils.py:401",
        "blocks: utils.py:471",
        "none",
    ),
}
SUPPORT = str(Path(__file__).parents[1] / "support")
RELEASES = ("0.12.0", "0.13.0", "0.18.1", "0.26.0", "0.32.0")
HAS_BOUND = ("0.22.1", "0.24.0", "0.26.0", "0.28.0", "0.32.0", "0.33.0")
NO_MLA_CAPTURE_OF_DRAFTS = ("0.22.1", "0.24.0")
"""Releases whose Triton MLA asserts one token a request while it captures a step with drafts."""
AS_IN = {"0.33.0": "0.32.0"}
LINES = {("CHUNKED_LOCAL", "0.33.0"): "blocks: utils.py:551"}
BATCHES = ("decode", "spec K + 1", "non-uniform spec", "prefill with context", "mixed")


def checked(name: str, device: SimulatedDevice, *names: str, model: str | None = None) -> BackendResult:
    return check_all(name, device, [case for case in CASES if case.name in (names or BATCHES)], model)


def check_all(
    name: str, device: SimulatedDevice, cases: Sequence[Case] | None = None, model: str | None = None
) -> BackendResult:
    subject = backend_subject(name, device, None if model is None else MODELS[model])
    tried_on = subject.device or device
    load = loaded_source()
    assert load is not None
    load.on_kernel = tried_on.kernel_did_not_run
    return check(subject, tried_on, cases=cases)


@pytest.mark.parametrize("name", EXPECTED)
def test_the_verdict_is_what_the_source_says(name: str, device: SimulatedDevice, release: str):
    if release not in (*RELEASES, *AS_IN):
        pytest.skip(f"what vLLM {release} does is not written down here")
    expected = LINES.get((name, release)) or EXPECTED[name][RELEASES.index(AS_IN.get(release, release))]
    verdict, _, site = expected.partition(": ")
    found = checked(name, device)
    assert found.verdict == verdict, found.explain()
    assert site in found.explain()


SPARSE_FP8 = {
    "0.13.0": (Need.PREFILL_ROWS, "copy to host (to) at vllm/v1/attention/backends/mla/flashmla_sparse.py:514"),
    "0.18.1": (Need.BLOCKING, "copy to host (cpu) at vllm/v1/attention/backends/mla/flashmla_sparse.py:367"),
}


def test_sparse_fp8_waits_with_deepseeks_heads_and_not_with_few(device: SimulatedDevice, release: str):
    """These releases copy the lengths of each batch with a prefill; with fewer heads they take another path."""
    if release not in SPARSE_FP8:
        pytest.skip(f"vLLM {release} does not copy there")
    need, site = SPARSE_FP8[release]
    found = checked("FLASHMLA_SPARSE_FP8", device, model="deepseek-v3.2")
    assert found.need is need, found.explain()
    assert {"prefill with context", "mixed"} <= found.faults.keys()
    assert site in found.explain()
    if release == "0.18.1":
        assert all(checked("FLASHMLA_SPARSE_FP8", device, model=few).passed for few in ("tiny", "deepseek-v3.2-tp8"))


def test_flash_attn_mla_waits_for_prompts_past_its_threshold_only(device: SimulatedDevice, release: str):
    """0.18.1 takes prompts of up to 512 tokens for decodes, which need no copy."""
    if release != "0.18.1":
        pytest.skip(f"vLLM {release} is not the one that copies there")
    found = check_all("FLASH_ATTN_MLA", device)
    assert found.need is Need.BLOCKING, found.explain()
    past = ["prompt past threshold", "prompt past threshold, with context"]
    assert list(found.faults) == [*past, "contexts past chunked_prefill_workspace_size"]
    assert "copy to host (cpu) at vllm/model_executor/layers/attention/mla_attention.py:1735" in found.explain()
    assert check_all("FLASH_ATTN_MLA", device, CASES).passed


WAITING = {
    "FLASHMLA_SPARSE_FP8": (
        "vllm/v1/attention/backends/mla/flashmla_sparse.py:367 in "
        "FlashMLASparseMetadataBuilder._build_fp8_separate_prefill_decode, called at "
        "vllm/v1/attention/backends/mla/flashmla_sparse.py:512: copy to host (cpu): "
        "common_attn_metadata.seq_lens.cpu()"
    ),
    "FLASH_ATTN_MLA": (
        "vllm/model_executor/layers/attention/mla_attention.py:1735 in MLACommonMetadataBuilder.build: "
        "copy to host (cpu): common_attn_metadata.compute_num_computed_tokens().cpu()"
    ),
}


@pytest.mark.parametrize("name", WAITING)
def test_a_builder_that_waits_with_real_models_only_is_not_shown_clean(
    name: str, device: SimulatedDevice, release: str
):
    if release != "0.18.1":
        pytest.skip(f"the lines are those of vLLM 0.18.1, not of {release}")
    found = check_all(name, device, CASES, "tiny")
    assert found.passed
    assert not found.shown_clean
    assert WAITING[name] in map(str, found.unreached)


def test_the_numbers_of_a_model_reach_the_builder(device: SimulatedDevice):
    made = {}
    for name in ("llama-70b", "llama-70b-tp8", "gpt-oss-120b-window", "gemma-3-27b"):
        subject = backend_subject("FLASH_ATTN", device, MODELS[name])
        built = build_batch(subject, CASES[0], Host.EXACT, device).builder
        made[name] = built.num_heads_q, built.num_heads_kv, built.headdim, built.aot_schedule
    assert made["llama-70b"] == (64, 8, 128, True)
    assert made["llama-70b-tp8"] == (8, 1, 128, True)
    # Layers with different windows share no schedule.
    assert made["gpt-oss-120b-window"] == (64, 8, 64, False)
    assert made["gemma-3-27b"] == (32, 16, 128, False)


def test_a_builder_of_latent_attention_gets_no_other_model(device: SimulatedDevice):
    with pytest.raises(AbsentError, match="FLASHMLA is not for llama-8b, which lacks latent attention; try deepseek"):
        backend_subject("FLASHMLA", device, MODELS["llama-8b"])


def test_an_authors_builder_is_tried_with_more_than_the_tiny_model(
    device: SimulatedDevice, loaded: VllmSource, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.syspath_prepend(SUPPORT)
    (found,) = run(["compat_outside:many_heads"], device, source=loaded).results
    assert found.models == THIRD_PARTY
    assert found.need is Need.BLOCKING
    assert {name.partition(", llama-70b")[1:] for name in found.faults} == {(", llama-70b", "")}
    (few,) = run(["compat_outside:many_heads"], device, models=["llama-70b-tp8"], source=loaded).results
    assert (few.passed, few.models) == (True, ("llama-70b-tp8",))


def test_every_builder_of_the_table_is_made_or_absent(device: SimulatedDevice, release: str):
    made, absent = [], []
    for name in BACKENDS:
        if "FLASHINFER" in name:
            continue  # another test of this process puts its own stub there
        try:
            found = checked(name, device, "decode", "prefill")
        except AbsentError:
            absent.append(name)
            continue
        assert found.failure is None, f"{name}: {found.failure}"
        assert found.ran, found.explain()
        made.append(name)
    assert len(made) >= 15, absent


def test_decodes_that_mla_takes_for_prefills_get_the_bound_for_their_context(device: SimulatedDevice, release: str):
    if release not in HAS_BOUND:
        pytest.skip(f"vLLM {release} has no upper bound to take")
    found = checked("TRITON_MLA", device)
    assert "chunked_context" in found.explain()
    assert "cu_seq_lens is " in found.explain()
    assert "non-uniform spec" in found.faults
    assert "prefill with context" not in found.faults


def test_a_common_prefix_is_uploaded_where_there_is_cascade_attention(device: SimulatedDevice, release: str):
    if Version(release) >= Version("0.32"):
        with pytest.raises(AbsentError, match="no cascade attention"):
            checked("FLASH_ATTN_CASCADE", device)
        return
    found = checked("FLASH_ATTN_CASCADE", device, "decode", "mixed", "draft step 2")
    assert [case.need for case in found.cases] == [Need.BLOCKING, None, None]
    assert "copy to device (tensor)" in found.explain()
    assert found.cases[1].not_run == "its requests share no full block"


def test_a_cpu_waits_for_nothing(device: SimulatedDevice):
    found = checked("CPU_ATTN", device)
    assert (found.passed, found.waits) == (True, ())
    assert "scheduler_metadata" in found.not_validated


def test_an_encoder_is_given_whole_prompts(device: SimulatedDevice):
    found = checked("ENCODER_ONLY", device, "decode", "prefill")
    assert [case.need for case in found.cases] == [None, Need.NONE]


def test_what_a_stubbed_kernel_computes_is_not_validated(device: SimulatedDevice):
    assert "scheduler_metadata" in checked("FLASH_ATTN", device).not_validated
    assert checked("TRITON_ATTN", device).not_validated == ()


def test_a_builder_that_this_release_does_not_have(device: SimulatedDevice, release: str):
    name = "TURBOQUANT" if release in RELEASES[:3] else "TREE_ATTN"
    with pytest.raises(AbsentError, match=f"vLLM {release} has no {name}"):
        backend_subject(name, device)


FLASHINFER = """
import json, sys
from pathlib import Path
from vllm_async_spec.compat.model_shapes import MODELS_OF
from vllm_async_spec.compat.suite import open_device, prepare, run
way, source, name = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
handle = prepare(source, plugin=way != "stock")
device = open_device("cpu", handle)
if way != "stock":
    from vllm_async_spec.vllm_plugin.patches import flashinfer_builder
    from vllm_async_spec.vllm_plugin.plugin import load
    load(report=False)
    if way == "uncorrected":
        flashinfer_builder.write_exact_lengths = lambda *arguments: None
(found,) = run([name], device, models=MODELS_OF[name][:1], source=handle).results
print(json.dumps([found.verdict, found.passed, found.explain()]))
"""


def flashinfer(way: str, source: Path, name: str = "FLASHINFER") -> tuple[str, bool, str]:
    """In a process of its own: what stands for flashinfer-python there is not what other tests of this folder use."""
    done = subprocess.run(
        [sys.executable, "-c", FLASHINFER, way, str(source), name], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    verdict, passed, why = json.loads(done.stdout.splitlines()[-1])
    return verdict, passed, why


def test_flashinfer_waits_in_stock_and_not_with_the_plugin(vllm_source: Path, release: str):
    verdict, passed, why = flashinfer("stock", vllm_source)
    assert verdict in ("exact", "blocks")
    assert not passed
    assert "flashinfer.py:" in why
    if release in HAS_BOUND:
        assert flashinfer("plugin", vllm_source)[:2] == ("none", True)


def test_flashinfers_plans_are_wrong_without_the_plugins_correction(vllm_source: Path, release: str):
    if release not in HAS_BOUND:
        pytest.skip(f"vLLM {release} gives no upper bound to plan from")
    verdict, passed, why = flashinfer("uncorrected", vllm_source)
    assert (verdict, passed) == ("exact", False)
    assert "told upper bound, decode.wrapper.lengths is " in why


def test_mla_prefill_with_flashinfer_is_planned_from_the_device(vllm_source: Path, release: str):
    line = {"0.12.0": "common.py:773", "0.13.0": "common.py:776", "0.18.1": "mla_attention.py:1627"}
    verdict, _, why = flashinfer("stock", vllm_source, "MLA_PREFILL_FLASHINFER")
    asserts = release in NO_MLA_CAPTURE_OF_DRAFTS
    assert verdict == ("fails" if asserts else "blocks")
    assert ("assert m.max_query_len <= self.reorder_batch_threshold" in why) is asserts
    assert ": told upper bound, it waits: " in why or release not in HAS_BOUND
    assert line.get(release, "mla/prefill/flashinfer.py:") in why


def test_trtllm_takes_device_lengths_where_its_builder_does(vllm_source: Path, release: str):
    verdict, passed, _ = flashinfer("stock", vllm_source, "FLASHINFER_TRTLLM")
    # From 0.21 on it writes its first offset on the device; before, it waits to copy a number there.
    assert (verdict, passed) == (("none", True) if Version(release) >= Version("0.21") else ("exact", False))


def test_flex_attention_knows_no_request_of_padded_tokens(device: SimulatedDevice):
    """Its mask reads past the end of its list for padded tokens.

    Releases that can be captured have a longer buffer there; an engine gives the others no padded tokens.
    """
    padded = next(case for case in CASES if case.name == "padded rows")
    subject = backend_subject("FLEX_ATTENTION", device)
    built = build_batch(subject, padded, Host.EXACT, device, watched=False).metadata
    requests = built.doc_ids
    assert requests.tolist() == [0] * 4 + [1] * 4
    assert built.num_actual_tokens == len(requests) + padded.token_padding
    in_memory = requests.untyped_storage().nbytes() // requests.itemsize - requests.storage_offset()
    assert (in_memory < built.num_actual_tokens) is not hasattr(built, "persistent_doc_ids")
    query, key = torch.arange(built.num_actual_tokens), torch.tensor(built.block_size)
    zero = torch.tensor(0)
    assert built.mask_mod(zero, zero, query[: len(requests)], key).tolist() == [True] * 4 + [False] * 4
    with pytest.raises(IndexError):
        built.mask_mod(zero, zero, query, key)
