"""Attention with what builders made."""

import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import compat_attention as planted
import compat_planted
import pytest
import torch
from compat_checked import NAMED, attended, line_of, report
from compat_command import installed, needs_vllm
from compat_cuda import PassesForCuda, without_cuda

from vllm_async_spec.compat import forward, layer, results
from vllm_async_spec.compat.cases import CASES, Call, Host
from vllm_async_spec.compat.check import check
from vllm_async_spec.compat.device import CudaDevice, Device
from vllm_async_spec.compat.forward import attend
from vllm_async_spec.compat.layer import Batch, NoForwardError, reference
from vllm_async_spec.compat.render import junit, markdown
from vllm_async_spec.compat.report import Run
from vllm_async_spec.compat.results import Need
from vllm_async_spec.compat.simulated_device import SimulatedDevice
from vllm_async_spec.compat.subject import Subject
from vllm_async_spec.compat.third_party import third_party_subject

STEPS = [case.name for case in CASES if case.call is not Call.CAPTURE]


def subject(kind: type[planted.Right], device: Device) -> Subject:
    return third_party_subject(f"compat_attention:{kind.__name__}", device)


@pytest.mark.parametrize("kind", planted.CLEAN)
def test_a_right_backend_is_right_with_every_batch_whatever_the_host_is_told(kind: type[planted.Right]):
    names = list(NAMED) if kind is planted.Right else ["mixed", "padded rows", "capture, K + 1"]
    found = attended(kind, *names)
    assert found.passed, found.explain()
    assert found.not_attended is None
    assert [case.case for case in found.cases if case.was_attended] == [name for name in names if name in STEPS]
    for case in found.steps:
        assert [each.host for each in case.attended] == [Host.EXACT, Host.BOUND, Host.ABSENT, Host.GARBAGE]
        assert all(each.right and not each.waits for each in case.attended)
    assert {each.not_run for case in found.cases if case.capture for each in case.attended} <= {forward._CAPTURE}


@pytest.mark.parametrize("kind", planted.FAULTY)
def test_a_fault_that_only_attending_shows_is_caught(kind: type[planted.Right]):
    device = SimulatedDevice()
    cases = [NAMED["spec K + 1"]]
    tried = subject(kind, device)
    built = check(tried, device, cases=cases)
    assert built.passed, "the builder alone is faulty"
    found = attend(tried, device, built, cases=cases)
    assert not found.passed
    assert kind.fault is not None
    assert any(kind.fault in fault for fault in found.cases[0].faults), found.cases[0].faults
    if "# here" in inspect.getsource(kind):
        assert any(line_of(kind) in fault for fault in found.cases[0].faults)
        frames = [frame for each in found.cases[0].attended for wait in each.waits for frame in wait.stack]
        assert {Path(frame.file).name for frame in frames} == {"compat_attention.py"}, "nobody asked who ran the suite"


def test_garbage_that_a_builder_is_found_not_to_need_and_that_attention_goes_by_is_noted():
    found = attended(planted.SecretLengths, "spec K + 1")
    assert found.passed, found.explain()
    assert any(str(planted.SecretLengths.note) in note for note in found.cases[0].notes), found.cases[0].notes


def test_what_attention_needs_counts_though_what_is_built_looks_the_same():
    device, cases = SimulatedDevice(), [NAMED["spec K + 1"]]
    tried = subject(planted.SecretSizes, device)
    built = check(tried, device, cases=cases)
    assert built.need is Need.NONE
    found = attend(tried, device, built, cases=cases)
    assert found.need is Need.UPPER_BOUND
    assert found.passed, found.explain()
    (case,) = found.cases
    assert {each.host for each in case.attended if each.right is False} == {Host.ABSENT, Host.GARBAGE_DECODES}
    assert any(note.startswith("told no lengths, attention is wrong") for note in case.notes), case.notes
    row = report(found).published.rows[0]
    assert (row.verdict, row.attention) == ("upper bound", "right, 1 of 1 batches")
    bound = attended(planted.SecretBound, "spec K + 1")
    assert bound.need is Need.EXACT


@pytest.mark.parametrize("name", ["compared", "watched", "poisoned"])
def test_without_its_detector_a_fault_would_pass(name: str, monkeypatch: pytest.MonkeyPatch):
    kind = {"compared": planted.LongestForAll, "watched": planted.Reads, "poisoned": planted.LooksAhead}[name]
    assert not attended(kind, "long").passed
    if name == "compared":
        monkeypatch.setattr(results, "TOLERANCE", float("inf"))
    elif name == "watched":
        monkeypatch.setattr(SimulatedDevice, "waited", lambda *_: None)
    else:
        monkeypatch.setattr("vllm_async_spec.compat.layer.POISON", 0.0)
    assert attended(kind, "long").passed


def test_what_fails_is_a_fault_and_says_why():
    found = attended(planted.Fails, "decode", "mixed")
    assert list(found.faults) == ["decode", "mixed"]
    assert found.faults["decode"][0].startswith(f"told upper bound, {planted.Fails.reason}")
    assert (found.passed, found.verdict) == (False, "fails")
    assert str(found.not_attended).startswith(str(planted.Fails.reason))
    row = report(found).published.rows[0]
    assert row.attention == f"not run: {found.not_attended}"
    assert row.forward_waits == "not run"


def test_what_fails_with_one_batch_is_told_of_that_one():
    found = attended(planted.FailsWithPrefills, "decode", "prefill")
    assert found.not_attended is None
    row = report(found).published.rows[0]
    assert row.attention == "right, 1 of 2 batches, fails with 1"
    assert list(row.faults.values()) == [["prefill"]]
    assert "- told upper bound, its forward fails: ValueError: no prefills" in markdown(report(found).published)
    assert (row.verdict, report(found).exit_code) == ("fails", 1)


def test_when_the_time_is_used_up_the_rest_is_not_run():
    found = attended(planted.Right, "decode", "mixed", "long", seconds=0.0)
    assert [case.was_attended for case in found.cases] == [True, False, False]
    assert report(found).published.rows[0].attention == "right, 1 of 3 batches"
    assert str(found.unfinished).startswith("attention was not tried with mixed, long, because its forwards took 0 sec")
    assert (found.passed, report(found).exit_code) == (False, 2), "nothing passes that was not tried"
    assert 'errors="1"' in junit(report(found))


def test_a_layer_may_refuse_with_a_reason():
    def refuse(builder: Any, device: Device) -> Any:
        raise NoForwardError("there is no such kernel")

    device = SimulatedDevice()
    tried = subject(planted.Right, device)
    refusing = Subject(tried.name, tried.make, tried.metadata, tried.source, layer=refuse)
    cases = [NAMED["decode"]]
    assert attend(refusing, device, check(refusing, device, cases=cases), cases=cases).not_attended == (
        "there is no such kernel"
    )


def test_a_builder_of_which_nothing_else_is_known_is_not_attended_with():
    found = attended(compat_planted.Clean, "decode")
    assert str(found.not_attended).startswith("only the builder was given; name a backend class with get_impl_cls")


def test_reports_say_it(tmp_path: Path):
    batches = ("decode", "long", "capture, K + 1")
    full = report(*(attended(kind, *batches) for kind in (planted.Right, planted.LongestForAll, planted.Reads)))
    data = json.loads(json.dumps(full.to_dict()))
    right, wrong, reads = Run.read(data).rows
    assert (right.attention, right.forward_waits) == ("right, 2 of 2 batches", "none")
    assert wrong.attention.startswith("wrong by 1e+03 told upper bound, 2 of 2 batches")
    assert (reads.attention, reads.forward_waits) == ("right, 2 of 2 batches", "1 place")
    assert any(line_of(planted.Reads) in site for site in reads.sites)
    assert [row.limits for row in (right, wrong, reads)] == [[], ["attention wrong"], ["waits in forward"]]
    page = markdown(full.published)
    assert re.search(r"\| 2 of 3 \| \d+ of \d+ \| +\| none \| right, 2 of 2 batches \|", page), page
    assert "| none | wrong by 1e+03 told upper bound, 2 of 2 batches |" in page
    assert "attention is wrong: it differs by up to 1e+03" in junit(full)


def test_a_result_of_before_there_was_attention_says_that_it_was_not_run():
    data = report(attended(planted.Right, "decode")).to_dict()
    del data["backends"][0]["not_attended"]
    for case in data["backends"][0]["cases"]:
        del case["attended"]
    row = Run.read(data).rows[0]
    assert row.attention == "not run: made by an older suite, which ran no attention"
    assert row.forward_waits == "not run"


@pytest.mark.parametrize("name", STEPS)
def test_chunked_attention_of_the_reference_is_that_of_one_long_mask(name: str):
    case, device, chunk = NAMED[name], SimulatedDevice(), 16
    batch = Batch.of(case, device)
    query, keys, values = (
        layer.random(device, seed, count, 1, 8, dtype=torch.float32)
        for seed, count in ((3, batch.tokens), (1, len(batch.content)), (2, len(batch.content)))
    )
    found = reference(batch, query, keys, values, scale=0.5, chunk=chunk)
    ends = torch.tensor(case.seq_lens).cumsum(0).tolist()
    token = 0
    for end, length, queries in zip(ends, case.seq_lens, case.query_lens, strict=True):
        for position in range(length - queries, length):
            if token % 7 == 0:  # a few of many
                seen = slice(end - length + position // chunk * chunk, end - length + position + 1)
                weights = (query[token, 0] @ keys[seen, 0].T * 0.5).softmax(-1)
                torch.testing.assert_close(found[token, 0], weights @ values[seen, 0], atol=1e-4, rtol=1e-4)
            token += 1
    assert token == len(found)


def test_requests_that_share_a_prefix_have_the_same_keys_there():
    case = NAMED["decode"]
    batch = Batch.of(case, SimulatedDevice(), common_prefix=16)
    starts = [0, *torch.tensor(case.seq_lens).cumsum(0).tolist()[:-1]]
    content = [batch.content[start : start + 17].tolist() for start in starts]
    assert all(each[:16] == content[0][:16] for each in content)
    assert len({each[16] for each in content}) == len(content)


@pytest.mark.slow
@needs_vllm
def test_the_cpu_backend_of_the_installed_vllm_attends_right(tmp_path: Path):
    done = installed("--backend", "CPU_ATTN", "--json", str(tmp_path / "found.json"))
    assert done.returncode == 0, done.stderr
    assert "1 of 1 builders run without a wait" in done.stdout
    assert "async-spec: none" in done.stdout
    (backend,) = json.loads((tmp_path / "found.json").read_text())["backends"]
    assert backend["not_attended"] is None
    ran = [each for case in backend["cases"] for each in case["attended"] if each["not_run"] is None]
    assert len(ran) == 4 * 16
    assert all(each["right"] for each in ran)


MLA = """
import sys
try:
    from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend
    from vllm.v1.attention.backends.mla.prefill.cpu_sdpa import CPUSDPAMLAPrefillBackend
except ModuleNotFoundError as error:
    sys.exit(f"there is no {error.name}")
from vllm_async_spec.compat.cases import CASES, release_metadata
from vllm_async_spec.compat.check import check
from vllm_async_spec.compat.subject import Subject
from vllm_async_spec.compat.forward import attend
from vllm_async_spec.compat.simulated_device import HostDevice
from vllm_async_spec.compat.mla import mla_builder
from vllm_async_spec.compat.mla import MlaLayer
from vllm_async_spec.compat.builder_inputs import BuilderInputs

def make(device):
    return mla_builder(CPUMLABackend.get_builder_cls(), BuilderInputs(device.device), 16, CPUSDPAMLAPrefillBackend)

device = HostDevice()
layer = lambda builder, device: MlaLayer(CPUMLABackend, builder, device, 16)
subject = Subject("CPU_MLA", make, release_metadata(), "vLLM", layer=layer)
cases = [case for case in CASES if case.name in ("decode", "prefill with context", "non-uniform spec")]
found = attend(subject, device, check(subject, device, cases=cases), cases=cases)
for case in found.cases:
    print(f"{case.case}: {', '.join(f'{each.host.value} {each.right}' for each in case.attended)}")
"""


@pytest.mark.slow
@needs_vllm
@pytest.mark.parametrize("way", ["stock", "plugin"])
def test_latent_attention_is_right_but_for_drafts_on_the_prefill_path_of_stock_vllm(way: str):
    """With the bound, requests with drafts see slots of rejected ones; the plugin mends it."""
    environment = os.environ | {"VLLM_ASYNC_SPEC": "off" if way == "stock" else "strict"}
    done = subprocess.run([sys.executable, "-c", MLA], capture_output=True, text=True, env=environment)
    if "there is no " in done.stderr:
        pytest.skip(done.stderr.splitlines()[-1])
    decode, ragged, prefill = (line.partition(": ")[2] for line in done.stdout.splitlines()[-3:])
    assert decode == "exact lengths True, upper bound True, no lengths True, garbage True", done.stderr[-2000:]
    assert prefill.startswith("exact lengths True, upper bound True, garbage for decodes True")
    assert "False" not in prefill
    assert ragged.startswith(f"exact lengths True, upper bound {way == 'plugin'}")


@pytest.mark.parametrize("kind", [planted.Right, planted.LongestForAll, planted.Warns, planted.Compiles])
def test_what_is_done_on_a_gpu_is_done_without_one_too(kind: type[planted.Right], monkeypatch: pytest.MonkeyPatch):
    without_cuda(monkeypatch)
    for part in (planted.Compiles.builder, planted.Compiles.impl):
        monkeypatch.setattr(part, "tune", planted.Tunes())
    found = attended(kind, "mixed", "padded rows", device=PassesForCuda())
    assert found.not_attended is None
    assert found.passed is (kind.fault is None), found.explain()
    assert all(str(kind.fault) in faults[0] for faults in found.faults.values())
    assert len(found.faults) == 2 * (kind.fault is not None)
    assert any(case.notes for case in found.cases) is (kind.fault is not None)


def test_what_is_compiled_while_it_is_watched_is_compiled_as_elsewhere(monkeypatch: pytest.MonkeyPatch):
    from torch._dynamo.testing import CompileCounterWithBackend

    without_cuda(monkeypatch)
    compiler = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda tensor: torch.empty_like(tensor).copy_(tensor) * 2, backend=compiler)
    for size in (5, 7, 9, 11):
        with PassesForCuda().watching() as waits:
            assert compiled(torch.ones(size, 3)).tolist() == [[2.0] * 3] * size
        assert waits == []
    assert compiler.frame_count == 2


def test_a_default_device_works_while_it_is_watched_and_afterwards(monkeypatch: pytest.MonkeyPatch):
    """PyTorch keeps the functions that take a default device from its first use on."""
    without_cuda(monkeypatch)
    torch.utils._device._device_constructors.cache_clear()
    with PassesForCuda().watching(), torch.device("meta"):
        assert torch.empty(1).is_meta
    with torch.device("meta"):
        assert torch.empty(1).is_meta


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [*planted.CLEAN, *planted.FAULTY])
def test_on_a_gpu_the_same_backends_are_found_to_be_the_same(kind: type[planted.Right]):
    found = attended(kind, "spec K + 1", "mixed", device=CudaDevice())
    assert found.not_attended is None
    assert found.passed is (kind.fault is None), found.explain()
    if kind.fault is not None:
        told = kind.fault.partition(":")[0]
        assert any(told in fault for faults in found.faults.values() for fault in faults), found.faults
    if "# here" in inspect.getsource(kind):
        assert any(line_of(kind) in fault for faults in found.faults.values() for fault in faults)
