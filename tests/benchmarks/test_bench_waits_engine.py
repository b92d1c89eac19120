"""What waits, by feature: the engine's side, with a vLLM that is a fake."""

import json
import types
from pathlib import Path
from typing import Any

import pytest

from benchmarks.features.files import write_tokenizer
from benchmarks.timing import Timing, TimingError
from benchmarks.waits import engine as waits_engine
from benchmarks.waits.cases import CASES, CaseRequest, Package, requests_of
from benchmarks.waits.engine import CaseDriver, LacksError, RefusedError, WaitsEngine

TIMING = Timing(seconds=1.0, tokens=10, steps=5, step_ms=2.0, tokens_per_second=10.0, acceptance_length=1.0)


class FakeEngine:
    """A vLLM engine that finishes a request in a step, and refuses the third."""

    def __init__(self, refused: type[Exception] | None = None) -> None:
        self.waiting: list[str] = []
        self.added: list[dict[str, Any]] = []
        self.aborted: list[str] = []
        self._refused = refused

    def add_request(self, name: str, prompt: Any, sampling: Any, **more: Any) -> None:
        if self._refused is not None and len(self.added) == 2:
            raise self._refused("too many\n logprobs")
        self.added.append({"name": name, "prompt": prompt, "sampling": sampling, **more})
        self.waiting.append(name)

    def step(self) -> list[Any]:
        self.waiting.pop()
        return [types.SimpleNamespace(finished=True)]

    def abort_request(self, names: list[str]) -> None:
        self.aborted += names

    def has_unfinished_requests(self) -> bool:
        return bool(self.waiting)


@pytest.fixture(autouse=True)
def plain_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits_engine, "sampling_params", lambda options, tokens: {**options, "max_tokens": tokens})


def drive(engine: FakeEngine, adapters: dict[int, str] | None = None) -> CaseDriver:
    return CaseDriver(types.SimpleNamespace(llm_engine=engine), adapters or {})


def test_each_request_has_its_own_parameters_and_adapter(monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("vllm")
    engine = FakeEngine()
    requests = [CaseRequest((1,), 8, {"logprobs": 1}), CaseRequest((2,), 9, {"detokenize": True}, adapter=3)]
    drive(engine, {3: "/an/adapter"}).run(requests, running=2)
    plain = {"temperature": 0.0, "ignore_eos": True, "detokenize": False}
    assert [each["sampling"] for each in engine.added] == [
        {**plain, "logprobs": 1, "max_tokens": 8},
        {**plain, "detokenize": True, "max_tokens": 9},
    ]
    lora = engine.added[1]["lora_request"]
    assert (lora.lora_int_id, lora.lora_path) == (4, "/an/adapter")
    assert engine.added[0]["lora_request"] is None


@pytest.mark.parametrize("kind", [ValueError, NotImplementedError])
def test_a_refused_request_leaves_the_engine_empty(kind: type[Exception]):
    engine = FakeEngine(kind)
    with pytest.raises(RefusedError, match=r"^too many logprobs$"):
        drive(engine).run([CaseRequest((1,), 8)] * 4, running=4)
    assert not engine.waiting
    assert engine.aborted == ["bench-0", "bench-1", "bench-2"]


def made(driver: Any, *, lacks_tokenizer: bool = False) -> tuple[WaitsEngine, list[str]]:
    """An engine without its start, and what was done to it."""
    done: list[str] = []
    engine = object.__new__(WaitsEngine)
    engine._shape, engine._lacks_tokenizer, engine._warm, engine._case_driver = "tiny", lacks_tokenizer, set(), driver
    engine._llm = types.SimpleNamespace(reset_prefix_cache=lambda: not done.append("reset"))
    return engine, done


class Timed:
    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.loads: list[str] = []

    def time(self, load: Any, requests: Any) -> Timing:
        if self.error is not None:
            raise self.error
        self.loads.append(load.name)
        return TIMING


def test_a_case_is_warm_before_it_is_timed_and_each_run_begins_with_an_empty_cache(monkeypatch: pytest.MonkeyPatch):
    clock = iter(range(100))
    monkeypatch.setattr(waits_engine.time, "perf_counter", lambda: float(next(clock)))
    driver = Timed()
    engine, done = made(driver)
    assert engine.time_case("churn", seconds=2.5) == {"runs": [[2.0, 5, 1.0]] * 3}
    assert driver.loads == ["churn"] * 4
    assert done == ["reset"] * 4
    engine.time_case("churn", seconds=0)
    assert len(driver.loads) == 5


@pytest.mark.parametrize(
    ("error", "key"), [(RefusedError("no"), "refused"), (TimingError("no step"), "failed"), (LacksError("no"), "lacks")]
)
def test_a_case_that_can_not_be_timed_is_answered(error: Exception, key: str):
    engine, _ = made(Timed(error))
    assert engine.time_case("plain", seconds=1) == {key: str(error)}


def test_what_the_environment_lacks_is_one_sentence(monkeypatch: pytest.MonkeyPatch):
    engine, _ = made(Timed(), lacks_tokenizer=True)
    said = "this environment has no package tokenizers, so the engine has no tokenizer; install it and run again"
    assert engine.time_case("stop-strings", seconds=1) == {"lacks": said}
    monkeypatch.setattr(waits_engine.importlib.util, "find_spec", lambda name: None)
    said = "this environment has no package xgrammar; install it and run again"
    assert engine.time_case("json-1", seconds=1) == {"lacks": said}
    with pytest.raises(LacksError, match="no package arctic-inference"):
        waits_engine._need(Package("arctic_inference", "arctic-inference"))


def test_the_tokenizer_has_a_text_for_every_token_of_the_vocabulary(tmp_path: Path):
    tokenizers = pytest.importorskip("tokenizers")
    folder = write_tokenizer(tmp_path, 1024)
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 1024
    texts = [tokenizer.decode([token], skip_special_tokens=False) for token in range(33, 1024)]
    assert all(texts)
    assert tokenizer.encode("aaaa").ids == tokenizer.encode("aa").ids * 2  # words are for decoding only
    assert json.loads((folder / "tokenizer_config.json").read_text())["eos_token"] == texts[256 - 33]


def test_every_case_that_needs_a_tokenizer_says_so():
    for case in CASES.values():
        texts = {"structured_outputs", "stop"} & case.sampling.keys()
        assert case.tokenizer is bool(texts), case.name
    assert requests_of(CASES["json-1"], "tiny")[1][1].sampling == {}
