"""Soaks of several tensor-parallel ranks: the parts of attentive weights, and delays and controls on each rank."""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bench_command import bench
from test_bench_acceptance import TARGET, VOCABULARY, arranged, dummy, keep_part
from torch import nn

from benchmarks import attentive_weights
from benchmarks.acceptance import MARK, SEED, VOTE, arrange
from benchmarks.attentive_weights import make_attentive
from benchmarks.child import environment
from benchmarks.engine import BenchEngine
from benchmarks.facts import EngineError
from benchmarks.options import LOAD_FORMAT, model_options
from benchmarks.shapes import Method
from benchmarks.soak.delays import Delays
from benchmarks.soak.soaks import SOAKS
from vllm_async_spec.demo.model import TinyLlama

RANKS = 2
TP2 = [soak for soak in SOAKS.values() if soak.name.endswith("-tp2")]


def made(vocabulary: int = VOCABULARY, dtype: torch.dtype = torch.float32) -> TinyLlama:
    return arranged(TinyLlama(TARGET).to(dtype), 0.9, vocabulary)


def noise(shape: tuple[int, ...], seed: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("padding", [0, 24])
def test_one_rank_has_the_weights_that_it_had_before_there_were_several(dtype: torch.dtype, padding: int):
    vocabulary = VOCABULARY - padding
    model, before = made(vocabulary, dtype), made(vocabulary, dtype)
    make_attentive(model, vocabulary)
    with torch.no_grad():
        head, hidden = before.lm_head.weight, TARGET.hidden
        share = (math.sqrt(2 * math.log(vocabulary)) + 1.25) * math.sqrt(1 + 1.25**2) / math.sqrt(hidden)
        others = noise((vocabulary - 1, hidden), SEED + 1, dtype)
        others[:, [MARK, VOTE]] = 0
        head[: vocabulary - 1] = head[: vocabulary - 1] * min(1.0, share) + others
        head /= math.sqrt(hidden)
        assert torch.equal(model.lm_head.weight, head)
        names = [name for name, _ in before.named_parameters()]
        name = "model.layers.1.self_attn.o_proj.weight"
        weight = before.get_parameter(name)
        scale = 1 / math.sqrt(2 * TARGET.layers)
        weight.copy_(noise((*weight.shape,), SEED + 1 + names.index(name), dtype) * (1.5 * scale / math.sqrt(hidden)))
        weight[[MARK, VOTE]] = 0
        assert torch.equal(model.get_parameter(name), weight)


def split_head(rank: int) -> TinyLlama:
    """A model with one rank's rows of the head."""
    model = TinyLlama(TARGET)
    dummy(model)
    keep_part(model, "lm_head", rank, RANKS)
    arrange(model, VOCABULARY, 0.9)
    return model


def test_the_ranks_heads_are_one_head_in_parts():
    whole, parts = made(), [split_head(rank) for rank in range(RANKS)]
    make_attentive(whole, VOCABULARY)
    for part in parts:
        make_attentive(part, VOCABULARY, ranks=RANKS)
    heads = [part.lm_head.weight for part in parts]
    assert torch.equal(torch.cat(heads), whole.lm_head.weight)
    assert not torch.equal(heads[0][:-1], heads[1][:-1])  # equal rows would be ties


def test_the_ranks_outputs_add_up_to_that_of_one_rank():
    class Layer(nn.Module):
        """What one of `ranks` holds of a layer."""

        def __init__(self, ranks: int) -> None:
            super().__init__()
            self.embed_tokens = nn.Embedding(VOCABULARY, 64)
            self.o_proj = nn.Linear(512 // ranks, 64, bias=False)
            self.qkv_proj = nn.Linear(64, 512 // ranks, bias=False)

    layers = [Layer(1), *(Layer(RANKS) for _ in range(RANKS))]
    for layer, ranks in zip(layers, (1, *[RANKS] * RANKS), strict=True):
        make_attentive(layer, VOCABULARY, ranks=ranks)
    one, first, last = layers
    assert torch.equal(first.o_proj.weight, last.o_proj.weight)
    assert torch.equal(first.qkv_proj.weight, last.qkv_proj.weight)
    x = torch.randn(2000, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        said = one.o_proj(one.qkv_proj(x))
        summed = first.o_proj(first.qkv_proj(x)) + last.o_proj(last.qkv_proj(x))
    assert summed.std() == pytest.approx(float(said.std()), rel=0.1)


def test_the_loader_says_how_many_ranks_there_are(monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("vllm")
    from vllm.config.load import LoadConfig
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    from benchmarks import loader

    monkeypatch.setattr(loader, "get_tensor_model_parallel_world_size", lambda: RANKS)
    monkeypatch.setattr(DummyModelLoader, "load_weights", lambda *_: None)
    model, found = made(), made()
    extra = {"share": 0.9, "draft_model": None, "attentive": True, "experts": False}
    config = SimpleNamespace(model="x", get_vocab_size=lambda: VOCABULARY)
    loader.ArrangedLoader(LoadConfig(load_format="dummy", model_loader_extra_config=extra)).load_weights(found, config)
    attentive_weights.make_attentive(model, VOCABULARY, ranks=RANKS)
    assert all(map(torch.equal, found.parameters(), model.parameters()))


def test_only_an_eagle3_drafter_is_refused_on_several_ranks(tmp_path: Any):
    arm = SOAKS["tiny-tp2"].subject
    options = model_options(arm.to_dict(), tmp_path)
    assert (options["load_format"], options["model_loader_extra_config"]["attentive"]) == (LOAD_FORMAT, True)
    with pytest.raises(EngineError, match="an EAGLE-3 drafter is not arranged across tensor-parallel ranks; run with"):
        model_options(replace(arm, method=Method.EAGLE3).to_dict(), tmp_path)


class FakeDevice:
    """Notes the work that it gets."""

    def __init__(self) -> None:
        self.worked: list[float] = []
        self.captures = False

    def capturing(self) -> bool:
        return self.captures

    def work(self, ms: float) -> None:
        self.worked.append(ms)


def fake_runner() -> Any:
    """A runner with two attention groups of one builder class."""

    class Builder:
        def build(self, lengths: int) -> int:
            return lengths + 1

    class Runner:
        attn_groups = ((SimpleNamespace(get_metadata_builder=lambda _: Builder()),) * 2,)

        def execute_model(self) -> str:
            return "step"

        def sample_tokens(self) -> str:
            return "tokens"

        def step(self) -> list[Any]:
            builder = self.attn_groups[0][0].get_metadata_builder(0)
            return [self.execute_model(), builder.build(6), self.sample_tokens()]

    return Runner()


PLACES = ["before execute_model", "before build", "after build", "before sample_tokens"]


def test_delays_come_at_every_place_until_they_end():
    device, runner = FakeDevice(), fake_runner()
    delays = Delays(runner, 0, device)
    runner.step()
    assert device.worked == []
    delays.begin()
    assert [runner.step() for _ in range(200)] == [["step", 7, "tokens"]] * 200
    device.captures, seen = True, len(device.worked)
    for _ in range(50):
        runner.step()
    assert len(device.worked) == seen  # a graph must not hold a delay
    device.captures = False
    counted = delays.end()
    assert {*counted} == {*PLACES}
    assert all(25 < count < 75 for count in counted.values())  # a quarter
    assert sum(counted.values()) == seen
    assert 0 <= min(device.worked) < max(device.worked) <= 6
    for _ in range(50):
        runner.step()
    assert len(device.worked) == seen


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device to delay")
def test_there_are_no_delays_without_a_device():
    with pytest.raises(RuntimeError, match="no CUDA device"):
        Delays(fake_runner(), 0)


def rank_workers(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The workers of two ranks, with fake devices."""
    pytest.importorskip("vllm")
    from benchmarks.worker import BenchWorker

    monkeypatch.setattr("benchmarks.soak.delays.CudaDevice", FakeDevice)
    workers: list[Any] = []
    for rank in range(RANKS):
        worker: Any = BenchWorker()
        worker.rank, worker.model_runner = rank, fake_runner()
        workers.append(worker)
    return workers


def engine_of(workers: list[Any]) -> Any:
    """An engine of these ranks, which can be reached by names of methods alone."""

    def collective_rpc(method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        return [getattr(worker, method)(*args) for worker in workers]

    engine: Any = object.__new__(BenchEngine)
    engine._llm = SimpleNamespace(collective_rpc=collective_rpc)
    return engine


def test_each_rank_has_delays_of_its_own(monkeypatch: pytest.MonkeyPatch):
    workers = rank_workers(monkeypatch)
    engine = engine_of(workers)
    with engine._delays(seed=3, late=True) as counted:
        for worker in workers:
            for _ in range(200):
                worker.model_runner.step()
    devices = [worker._bench_delays._device for worker in workers]
    assert {*counted} == {f"rank {rank}: {place}" for rank in range(RANKS) for place in PLACES}
    assert sum(counted.values()) == sum(len(device.worked) for device in devices)
    assert devices[0].worked != devices[1].worked
    for worker, device in zip(workers, devices, strict=True):
        seen = len(device.worked)
        for _ in range(50):
            worker.model_runner.step()
        assert len(device.worked) == seen
    with engine_of(workers[:1])._delays(seed=3, late=True) as counted:
        for _ in range(200):
            workers[0].model_runner.step()
    assert {*counted} == {*PLACES}


def test_without_delays_no_rank_is_asked():
    with engine_of([None])._delays(seed=0, late=False) as counted:
        pass
    assert counted == {}


def metadata_builder() -> type[Any]:
    class Builder:
        def build(self, prefix: int, metadata: Any) -> Any:
            return metadata.seq_lens.tolist()

    return Builder


def lengths_of(worker: Any) -> Any:
    builder = worker.model_runner.attn_groups[0][0].get_metadata_builder(0)
    return builder.build(0, SimpleNamespace(seq_lens=torch.tensor([1, 5])))


@pytest.mark.parametrize(
    ("control", "found"), [("short", [[1, 4], [1, 4]]), ("short-last-rank", [[1, 5], [1, 4]]), (None, [[1, 5], [1, 5]])]
)
def test_a_control_is_planted_on_every_rank_or_on_the_last(
    control: str | None, found: list[list[int]], monkeypatch: pytest.MonkeyPatch
):
    workers = rank_workers(monkeypatch)
    for worker in workers:
        builder = metadata_builder()
        group = SimpleNamespace(get_metadata_builder=lambda _, builder=builder: builder())
        worker.model_runner = SimpleNamespace(attn_groups=[[group]])
    ranks = iter(range(RANKS))
    monkeypatch.setattr("vllm.distributed.get_tensor_model_parallel_rank", lambda: next(ranks))
    monkeypatch.setattr("vllm.distributed.get_tensor_model_parallel_world_size", lambda: RANKS)
    engine_of(workers)._break(control)
    assert [lengths_of(worker) for worker in workers] == found


def test_a_worker_counts_the_fallbacks_of_its_process(monkeypatch: pytest.MonkeyPatch):
    from vllm_async_spec.sync_policy import record_fallback, reset_sync_report

    (worker, _) = rank_workers(monkeypatch)
    reset_sync_report()
    record_fallback("a reason")
    assert worker.bench_fallbacks() == {"a reason": 1}
    reset_sync_report()


def test_soaks_have_vllms_compilation_and_those_of_several_ranks_spawn_their_workers():
    assert [soak.name for soak in TP2] == [
        "tiny-tp2",
        "0.32.0-V2-FLASHINFER-tp2",
        "0.26.0-V2-FLASHINFER-tp2",
        "0.26.0-V1-FLASHINFER-tp2",
        "0.26.0-V1-FLASH_ATTN-tp2",
        "0.18.1-V1-FLASH_ATTN-tp2",
    ]
    for soak in TP2:
        alone = SOAKS[soak.name.removesuffix("-tp2")]
        assert (soak.subject.gpus, alone.subject.gpus) == (RANKS, 1)
        assert soak.oracle.engine == soak.subject.engine
        assert environment(soak.subject, {})["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"
        assert "VLLM_WORKER_MULTIPROC_METHOD" not in environment(alone.subject, {})
        if soak.subject.needs_gpu:
            here, there = dict(soak.subject.engine), dict(alone.subject.engine)
            assert here.pop("tensor_parallel_size") == RANKS
            assert here == there
            assert "compilation_config" not in here
            assert here["enable_prefix_caching"] is False


@pytest.mark.parametrize(("gpus", "code"), [([8e10], 2), ([8e10, 8e10], 0)])
def test_too_few_gpus_are_told_in_one_sentence(gpus: list[float], code: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("benchmarks.machine.has_gpu", lambda: True)
    monkeypatch.setattr("benchmarks.machine.gpus", lambda: gpus)
    monkeypatch.setattr("benchmarks.cli.common.installed_vllm", lambda: "0.32.0")
    verdict = {"outcomes": {"same": 1, "swapped": 0, "different": 0}, "tokens": 1, "widest_swap": 0.0, "seconds": 1.0}
    verdict |= {"first_different": [], "delays": {}, "fallbacks": {}, "prepared": {}}
    monkeypatch.setattr("benchmarks.cli.tokens.run_soak", lambda *_, **__: iter([verdict]))
    done = bench("soak", "0.32.0-V2-FLASHINFER-tp2")
    assert done.exit_code == code
    if code:
        assert done.output == (
            "benchmarks: the soak 0.32.0-V2-FLASHINFER-tp2 needs 2 GPUs, and this machine has 1; "
            "run it on a larger one\n"
        )
