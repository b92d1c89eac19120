"""How far a ratio can be trusted, and that none is told where the noop arm is not stock."""

import random
import re
from typing import Any

import pytest
from bench_documents import FACTS, document, row

from benchmarks.arms import PlanError
from benchmarks.present import grid, notes
from benchmarks.statistics import paired_ratio, refusal, student_quantile
from benchmarks.summary import against, summarise


def noisy(source: random.Random, factor: float = 1.0, passes: int = 4, noise: float = 0.005) -> list[float]:
    return [100 * factor * (1 + source.gauss(0, noise)) for _ in range(passes)]


def measured(seed: int, noop: float = 1.0) -> dict[str, Any]:
    source = random.Random(seed)
    return document({"stock": noisy(source), "noop": noisy(source, noop), "plugin": noisy(source, 1.05)})


@pytest.mark.parametrize(("degrees", "t"), [(1, 12.706), (2, 4.303), (3, 3.182), (5, 2.571), (10, 2.228), (30, 2.042)])
def test_students_quantiles_are_those_of_the_tables(degrees: int, t: float):
    assert student_quantile(degrees) == pytest.approx(t, abs=6e-4)


def test_a_planted_difference_is_found():
    source, tries = random.Random(1), 1000
    found = [paired_ratio(noisy(source), noisy(source, 1.05)) for _ in range(tries)]
    assert all(each is not None and each.low > 1 for each in found)
    covered = sum(each is not None and each.low <= 1.05 <= each.high for each in found)
    assert covered / tries == pytest.approx(0.95, abs=0.02)


def test_drift_that_meets_both_arms_does_not_widen_the_interval():
    drift = [1, 0.9, 0.8, 0.7]
    found = paired_ratio([100 * factor for factor in drift], [105 * factor for factor in drift])
    assert found is not None
    assert found.low == pytest.approx(1.05)
    assert found.high == pytest.approx(1.05)


@pytest.mark.parametrize("passes", [2, 4, 6])
def test_of_equal_arms_the_interval_covers_one_as_often_as_it_says(passes: int):
    source, tries = random.Random(2), 3000
    covered = 0
    for _ in range(tries):
        found = paired_ratio(noisy(source, passes=passes), noisy(source, passes=passes))
        assert found is not None
        covered += found.low <= 1 <= found.high
    assert covered / tries == pytest.approx(0.95, abs=0.012)  # three standard deviations


def test_one_pass_gives_no_interval():
    assert paired_ratio([100], [105]) is None
    found = document({"stock": [100], "noop": [100], "plugin": [105]})
    assert "ratio" not in row(found, "plugin")
    assert "fewer than two control passes" in row(found, "plugin")["refused"]


def test_a_noop_that_is_stock_lets_the_ratio_be_told():
    found = measured(3)
    for load in ("decode-1", "mixed"):
        assert row(found, "plugin", load)["ratio"]["value"] == pytest.approx(1.05, abs=0.02)
    assert notes(found) == []


def test_a_noop_that_is_not_stock_refuses_every_ratio_and_says_why():
    found = measured(4, noop=0.95)
    refused = row(found, "plugin")
    assert "ratio" not in refused
    words = (
        r"the noop arm, which is stock in all but name, differs from stock by -4\.8%, more than the noise of ±1\.1%; .+"
    )
    assert re.fullmatch(words, refused["refused"])
    assert refused["step_ms"]["median"] == pytest.approx(9.52, rel=0.01)  # the raw figures stay
    assert [cells[6] for cells in grid(found).rows if cells[1] == "plugin"] == ["-", "-"]
    assert [note.split(":")[0] for note in notes(found)] == ["Ratios omitted for decode-1, mixed"]


def test_the_noise_that_a_refusal_states_is_what_it_goes_by():
    quiet, noisier = paired_ratio([100, 100, 100], [99, 98.9, 99.1]), paired_ratio([100, 100, 100], [99, 96, 102])
    assert quiet is not None
    assert noisier is not None
    assert quiet.noise < 0.01 < noisier.noise
    assert refusal(quiet) is not None
    assert refusal(noisier) is None


def test_turns_of_two_machines_are_not_compared():
    one = document({"stock": [100, 101], "noop": [100, 101], "plugin": [105, 106]})
    other = dict(FACTS) | {"hardware": {"device": "another"}}
    for turn in one["turns"][-1:]:
        turn["facts"] = other
    one["summary"] = summarise(one)
    assert row(one, "plugin")["refused"] == "the turns ran on 2 different machines"


def test_arms_can_be_compared_with_another_than_the_reference():
    found = document({"stock": [100, 102], "noop": [101, 100], "plugin": [210, 190]})
    compared = against(found, "plugin")
    assert row(compared, "stock")["ratio"]["value"] == pytest.approx((100 / 210 * 102 / 190) ** 0.5)
    assert "ratio" not in row(compared, "plugin")
    assert grid(compared).head[6] == "speed, plugin = 1"
    assert row(found, "plugin")["ratio"]["value"] == pytest.approx(1 / row(compared, "stock")["ratio"]["value"])


def test_noise_that_forbids_ratios_forbids_those_to_another_arm_too():
    found = measured(4, noop=0.95)
    compared = against(found, "plugin")
    assert "ratio" not in row(compared, "noop")
    assert row(compared, "noop")["refused"] == row(found, "plugin")["refused"]


def test_an_arm_that_is_not_there_is_named():
    with pytest.raises(PlanError, match="has no arm 'nobody'; it has stock, noop, plugin"):
        against(document({"stock": [100, 102]}), "nobody")
