"""A hybrid's prompts whose last chunk is as long as a step of decoding, where decoding reads what CUDA graphs read."""

import pytest
from hybrid_engine import PROMPTS, found
from scenario import Mode, environment

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def expected() -> dict[int, list[int]]:
    return found("eager", environment())


def test_stock_answers_them_from_states_of_no_request(expected: dict[int, list[int]]):
    answered = found("graphs", environment())
    assert {length: answered[length] != expected[length] for length in PROMPTS} == PROMPTS


def test_the_plugin_answers_all_alike(expected: dict[int, list[int]]):
    assert found("graphs", environment(Mode.PLUGIN)) == expected
