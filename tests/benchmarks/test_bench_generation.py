"""The benchmark of generate, on a model of a few layers and no GPU."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="generation needs transformers: pip install 'vllm-async-spec[transformers]'")

from benchmarks import generation

SIZE = {"tiny": {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(generation, "SIZES", SIZE)


def measure(**kwargs: Any) -> dict[str, Any]:
    settings = {"size": "tiny", "device": "cpu", "batch": 2, "new_tokens": 5, "passes": 2}
    return generation.measure(**{**settings, **kwargs})


def test_every_arm_is_measured_and_compared_with_what_it_changes(capsys: pytest.CaptureFixture[str]):
    found = measure()
    assert list(found["tokens_per_second"]) == ["synchronous", "transformers", "asynchronous", "graphs", "interleaved"]
    assert all(len(speeds) == 2 for speeds in found["tokens_per_second"].values())
    assert found["memory"]["interleaved"]["cache"] > 0
    shown = generation.table(found)
    cells = {
        name: [column._cells[row] for column in shown.columns[2:]]
        for row, name in enumerate(found["tokens_per_second"])
    }
    assert cells["synchronous"] == ["-", "-", "-"]
    assert [each == "-" for each in cells["graphs"]] == [False, False, True]
    assert "-" not in cells["interleaved"]


def test_the_static_arms_are_paired_and_run_alone():
    found = measure(arms=["static", "static asynchronous"])
    assert list(found["tokens_per_second"]) == ["synchronous", "static", "static asynchronous"]
    assert found["memory"] == {}
    cells = {row[0]: row[2:] for row in generation.rows(found)}
    assert [each == "-" for each in cells["static"]] == [False, True, True]
    assert [each == "-" for each in cells["static asynchronous"]] == [False, True, False]
    assert generation.notes(found)[0].startswith("against `static`, transformers' own loop with a static cache, ")
    speeds = {"static": [1.0, 1.0], "static asynchronous": [6.0, 6.0]}
    for added, ratio in (({}, "6.000"), ({"static synchronous": [3.0, 3.0]}, "2.000")):
        last = list(generation.rows({"tokens_per_second": speeds | added}))[1]
        assert last[-1].startswith(ratio)
    assert "the noise is unknown, because `transformers` is not among the arms" in generation.notes(found)[-1]


def test_a_static_arm_has_a_static_cache_on_a_model_of_its_own():
    models = {name: generation.make_model("tiny", "cpu") for name in ("interleaved", "static")}
    made = generation.make_arms(models, "cpu", 1, 3)
    caches = []
    models["static"].register_forward_hook(
        lambda module, args, kwargs, out: caches.append(out.past_key_values), with_kwargs=True
    )
    for name in ("static", "static synchronous", "static asynchronous"):
        made[name]()
    assert len(caches) == 9
    assert {type(cache).__name__ for cache in caches} == {"StaticCache"}


def test_ungraphed_arms_are_compiled_and_launched():
    asked: list[dict[str, Any]] = []
    models = {"ungraphed": SimpleNamespace(generate=lambda *_, **way: asked.append(way))}
    made = generation.make_arms(models, "cpu", 1, 3)
    made["ungraphed"]()
    made["ungraphed interleaved"]()
    assert [(way["torch_compile"], way["cuda_graphs"], way["interleaved"]) for way in asked] == [
        (True, False, False),
        (True, False, True),
    ]


def test_an_arm_that_is_not_there_is_named():
    with pytest.raises(generation.GenerationError, match="there is no arm 'statik'; there are synchronous, "):
        measure(arms=["statik"])


def test_the_next_token_is_never_close():
    model = generation.make_model("tiny", "cpu")
    ids = torch.arange(generation.VOCABULARY)[None]
    logits = model(ids).logits[0]
    best = logits.topk(2, dim=-1)
    assert torch.equal(best.indices[:, 0], (5 * ids[0] + 3) % generation.VOCABULARY)
    # bfloat16 has eight bits, so its rounding is some 0.4 % of the largest.
    assert ((best.values[:, 0] - best.values[:, 1]) / best.values[:, 0]).min() > 0.1


def test_arms_with_other_tokens_get_no_ratio(monkeypatch: pytest.MonkeyPatch):
    arms = generation.make_arms

    def one_is_wrong(*args: Any) -> dict[str, Any]:
        made = arms(*args)
        right = made["interleaved"]
        return {**made, "interleaved": lambda: right() + 1}

    monkeypatch.setattr(generation, "make_arms", one_is_wrong)
    with pytest.raises(generation.GenerationError, match="interleaved generates other tokens than the synchronous"):
        measure()
