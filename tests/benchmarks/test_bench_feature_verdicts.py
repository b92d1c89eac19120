"""Verdicts on the feature cases."""

import json
from pathlib import Path
from typing import Any

from feature_answers import GPU, judged, plain, planted, seen, served, stock

from benchmarks.arms import Plugin
from benchmarks.features.cases import find_feature
from benchmarks.features.run import Seen, judge
from benchmarks.features.table import feature_grid
from benchmarks.soak.engine import NEAR


def test_the_same_tokens_are_as_stock():
    found = judged(plain(), seen(plain()))
    assert (found["verdict"], found["why"]) == ("as stock", [])
    assert found["outcomes"]["late"]["outcomes"] == {"same": 24, "swapped": 0, "different": 0}


def test_one_planted_token_in_one_request_is_found():
    found = judged(plain(), seen(plain(), planted(5, 3, 997)))
    assert found["verdict"] == "wrong"
    assert found["why"][0] == (
        "1 of 24 requests differ in plugin; "
        "request 5 differs from token 3 on, by a token not among stock's noted tokens"
    )


def test_a_near_tie_is_forgiven_and_a_wider_one_is_not():
    near, wide = (judged(plain(), seen(plain(), planted(5, 3, token))) for token in (999, 998))
    assert near["verdict"] == "as stock"
    assert near["outcomes"]["plugin"]["outcomes"]["swapped"] == 1
    assert wide["why"][0].endswith(f"by a token {2 * NEAR:.3f} behind stock's")


def test_stock_may_say_otherwise_without_log_probabilities_and_the_plugin_may_say_either(tmp_path: Path):
    feature, torn = plain(), planted(5, 3, 997)
    reference = stock(feature)
    assert reference.served is not None
    torn(reference.served)
    for change in (torn, lambda made: None):
        found = judge(feature, reference, seen(feature, change), GPU, Plugin.ON)
        assert (found["verdict"], found["why"]) == ("as stock", [])
        assert found["outcomes"]["plugin"]["outcomes"]["same"] == 24
        assert found["outcomes"]["stock again"]["outcomes"]["different"] == 1
    (tmp_path / "features-eagle.json").write_text(json.dumps(found))
    (row,) = [row for row in feature_grid(tmp_path).rows if row[0].startswith("`eagle`")]
    assert row[5].endswith("; stock itself differs in 1 if log-probabilities are requested")
    neither = judge(feature, reference, seen(feature, planted(5, 3, 996)), GPU, Plugin.ON)
    assert "1 of 24 requests differ in plugin" in neither["why"][0]


def test_what_differs_only_with_the_device_late_is_found():
    subject = seen(plain())
    assert subject.late is not None
    planted(0, 0, 997)(subject.late)
    assert "differ in late" in judged(plain(), subject)["why"][0]


def test_drawn_tokens_are_forgiven_nothing():
    feature = plain("top-k-top-p")
    oracle = stock(feature)
    oracle.noted = served(feature)
    subject = seen(feature, planted(5, 3, 999))
    assert judge(feature, oracle, subject, GPU, Plugin.ON)["verdict"] == "wrong"


def test_a_wait_for_another_reason_is_found_and_so_is_none_where_one_is_due():
    for feature, waits in ((plain(), {"penalties": 1}), (plain("penalties"), {}), (plain("penalties"), {"drafter": 2})):
        found = judged(feature, seen(feature, lambda made, waits=waits: made.update(fallbacks=waits)))
        assert [why for why in found["why"] if "waited for exact counts" in why], (feature.name, waits)


def test_a_patch_that_is_refused_and_scheduling_that_is_not_asynchronous_are_found():
    refused = judged(plain(), seen(plain(), lambda made: made.update(patch="refused: its target has changed")))
    assert refused["why"] == ["the patch optimistic-runner is refused: its target has changed"]
    synchronous = judged(plain(), seen(plain(), async_scheduling=False))
    assert synchronous["why"] == ["scheduling was synchronous"]


def test_log_probabilities_that_moved_are_found():
    def change(made: dict[str, Any]) -> None:
        made["requests"][1]["logprobs"] = [-1.0, -1.2]

    feature, oracle = plain("logprobs"), stock(plain("logprobs"))
    assert oracle.served is not None
    oracle.served["requests"][1]["logprobs"] = [-1.0, -1.0]
    found = judge(feature, oracle, seen(feature, change), GPU, Plugin.ON)
    assert found["why"][0] == "log-probabilities of the same tokens are 0.200 apart in plugin"


def test_vllms_refusal_counts_only_with_its_words_and_in_each_arm():
    feature = find_feature("logit-bias")
    assert feature.refused is not None
    refusing, other = Seen(error=f"ValueError: The {feature.refused}."), Seen(error="RuntimeError: out of memory")
    assert judge(feature, refusing, refusing, GPU, Plugin.ON)["verdict"] == "refused by vLLM"
    assert judge(feature, refusing, other, GPU, Plugin.ON)["verdict"] == "wrong"
    assert judge(feature, refusing, seen(feature), GPU, Plugin.ON)["verdict"] == "wrong"


def test_an_engine_that_died_is_wrong_with_its_reason():
    found = judge(plain(), Seen(error="RuntimeError: out of memory"), Seen(), GPU, Plugin.ON)
    assert (found["verdict"], found["why"]) == ("wrong", ["RuntimeError: out of memory"])
