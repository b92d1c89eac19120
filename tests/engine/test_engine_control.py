"""The comparison itself: it finds what is wrong, and says where."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from comparison import Outcome, first_difference
from results import Completion, Mode

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]

GOOD = Completion("Q: Why?", (39, 72, 13), "Hi.", "stop", 13, (-0.1, -0.2, -0.3))


@pytest.mark.parametrize("outcome", ["one-too-many", "a-step-late"], indirect=True)
@pytest.mark.parametrize("mode", [Mode.ASYNC, Mode.PLUGIN])
def test_engine_that_loses_count_is_found_out(outcome: Outcome, mode: Mode):
    assert outcome.difference(mode) is not None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda good: replace(good, token_ids=(39, 68, 13)), "token 1 is 68 'e' instead of 72 'i', after 'H'"),
        (lambda good: replace(good, token_ids=(39, 72)), "number of tokens is 2 instead of 3"),
        (lambda good: replace(good, token_ids=(39, 72, 13, 13)), "number of tokens is 4 instead of 3"),
        (lambda good: replace(good, finish_reason="length"), "finish_reason is 'length' instead of 'stop'"),
        (lambda good: replace(good, stop_reason=None), "stop_reason is None instead of 13"),
        (lambda good: replace(good, text="Hi!"), "text is 'Hi!' instead of 'Hi.'"),
        (lambda good: replace(good, prompt="Q: Who?"), "prompt is 'Q: Who?' instead of 'Q: Why?'"),
        (lambda good: replace(good, logprobs=()), "number of log-probabilities is 0 instead of 3"),
        (lambda good: replace(good, logprobs=(-0.1, -0.25, -0.3)), "log-probability of token 1 is -0.2500"),
        (lambda good: replace(good, logprobs=(-0.1, -0.2, float("nan"))), "log-probability of token 2 is nan"),
    ],
)
def test_every_kind_of_difference_is_said(change: Callable[[Completion], Completion], said: str):
    pytest.importorskip("tokenizers", reason="differences are shown as text, by the demo's tokenizer")
    found = first_difference([GOOD, GOOD], [GOOD, change(GOOD)])
    assert found is not None
    assert found.startswith(f"request 1, 'Q: Why?': {said}")


def test_missing_request_is_a_difference():
    assert first_difference([GOOD, GOOD], [GOOD]) == "1 requests instead of 2"


def test_equal_is_equal():
    assert first_difference([GOOD], [replace(GOOD, logprobs=(-0.1004, -0.2, -0.3))]) is None
