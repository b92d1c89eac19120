"""Tokens of the plugin are those of stock vLLM, one by one, whatever the requests ask for."""

import json
import re
from collections.abc import Mapping

import pytest
from catalogue import ABORTED_AT, BAD_WORDS, CHOICES, COMMON, MAX_MODEL_LEN, MIN_TOKENS, REGEX, SCENARIOS, STOP_STRINGS
from comparison import Outcome
from results import Completion, Mode

from vllm_async_spec.demo.train import PROMPTS

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]  # the first test runs all scenarios, and may train models

ASYNC_MODES = (Mode.ASYNC, Mode.PLUGIN)
CONTROLS = ("one-too-many", "a-step-late")
UPSTREAM_DIFFERS = ("min-tokens",)
ONLY_SYNCHRONOUS = ("n-gram",)
SAME = [name for name in SCENARIOS if name not in CONTROLS + UPSTREAM_DIFFERS + ONLY_SYNCHRONOUS]


def scenario(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("outcome", names, indirect=True)


@scenario(*SAME, *ONLY_SYNCHRONOUS, *UPSTREAM_DIFFERS)
def test_plugin_gives_the_tokens_of_stock_vllm(outcome: Outcome):
    assert outcome.difference(Mode.PLUGIN) is None


@scenario(*SAME)
def test_asynchronous_stock_vllm_gives_them_too(outcome: Outcome):
    assert outcome.difference(Mode.ASYNC) is None


@scenario("min-tokens")
def test_vllm_itself_breaks_min_tokens_when_asynchronous(outcome: Outcome):
    """vLLM counts drafts in flight as output, so stop tokens are free too early; the patch min-tokens mends it."""

    def early(completions: tuple[Completion, ...]) -> list[int]:
        return [i for i, done in enumerate(completions) if set(done.token_ids[:MIN_TOKENS]) & set(COMMON)]

    assert early(outcome[Mode.SYNC].completions) == early(outcome[Mode.PLUGIN].completions) == []
    assert early(outcome[Mode.ASYNC].completions), "upstream has mended it: the patch min-tokens can go"


@scenario("many-1", "many-3", "many-5")
@pytest.mark.parametrize("mode", ASYNC_MODES)
def test_no_draft_is_lost(outcome: Outcome, mode: Mode):
    expected, got = outcome[Mode.SYNC].acceptance_length, outcome[mode].acceptance_length
    # The last drafts of a request that reaches max_tokens may be counted or not.
    assert got == pytest.approx(expected, rel=0.02)
    assert got > 1.3


@scenario("preemption")
@pytest.mark.parametrize("mode", Mode)
def test_preemption_really_happened(outcome: Outcome, mode: Mode):
    assert outcome[mode].preemptions > 0


@scenario("prefix-caching")
@pytest.mark.parametrize("mode", Mode)
def test_prefixes_really_came_from_the_cache(outcome: Outcome, mode: Mode):
    assert outcome[mode].cached_tokens > 1000


@scenario("model-length")
def test_requests_really_reached_the_end_of_the_model(outcome: Outcome):
    for done in outcome[Mode.PLUGIN].completions:
        assert (len(done.prompt) + len(done.token_ids), done.finish_reason) == (MAX_MODEL_LEN, "length")


@scenario("end-of-text")
def test_text_really_ended(outcome: Outcome):
    assert ("stop", None) in {(done.finish_reason, done.stop_reason) for done in outcome[Mode.PLUGIN].completions}


@scenario("abort")
def test_aborted_requests_were_right_until_then(outcome: Outcome, outcomes: Mapping[str, Outcome]):
    whole = {done.prompt: done.token_ids for done in outcomes["to-the-end"][Mode.SYNC].completions}
    known = [done for done in outcome[Mode.PLUGIN].completions if done.prompt in whole]
    for done in known:
        assert done.token_ids == whole[done.prompt][: len(done.token_ids)]
    cut = {PROMPTS.index(done.prompt) for done in known if done.finish_reason is None}
    assert cut == {number for number, at_least in ABORTED_AT.items() if at_least}, "aborted when it was too late"


@scenario("to-the-end")
def test_as_many_tokens_as_asked_for(outcome: Outcome):
    assert {len(done.token_ids) for done in outcome[Mode.PLUGIN].completions} == {64}


@scenario("stop-strings")
def test_stop_strings_stop(outcome: Outcome):
    stopped = [done for done in outcome[Mode.PLUGIN].completions if done.stop_reason is not None]
    assert len(stopped) > 8
    for done in stopped:
        assert done.stop_reason in STOP_STRINGS
        assert done.text.endswith(str(done.stop_reason))


@scenario("bad-words")
def test_bad_words_do_not_appear(outcome: Outcome):
    for done in outcome[Mode.PLUGIN].completions:
        assert not any(word in done.text for word in BAD_WORDS)


@scenario("allowed-tokens")
def test_no_token_but_the_allowed_ones(outcome: Outcome):
    assert {token for done in outcome[Mode.PLUGIN].completions for token in done.token_ids} <= set(COMMON)


@scenario("regex")
def test_regex_is_kept(outcome: Outcome):
    for done in outcome[Mode.PLUGIN].completions:
        assert done.finish_reason == "length" or re.fullmatch(REGEX, done.text)


@scenario("json-schema")
def test_json_schema_is_kept(outcome: Outcome):
    finished = [json.loads(done.text) for done in outcome[Mode.PLUGIN].completions if done.finish_reason == "stop"]
    assert finished
    assert all(set(value) == {"name", "size", "up"} for value in finished)


@scenario("choice")
def test_choice_is_one_of_those_given(outcome: Outcome):
    assert {done.text for done in outcome[Mode.PLUGIN].completions} <= set(CHOICES)


@scenario("penalties")
def test_penalties_do_something(outcome: Outcome, outcomes: Mapping[str, Outcome]):
    without = {done.token_ids for done in outcomes["to-the-end"][Mode.PLUGIN].completions}
    assert not without & {done.token_ids for done in outcome[Mode.PLUGIN].completions}


@scenario("logprobs")
def test_every_token_has_a_logprob(outcome: Outcome):
    for done in outcome[Mode.PLUGIN].completions:
        assert len(done.logprobs) == len(done.token_ids)


@scenario("logit-bias")
@pytest.mark.parametrize("mode", Mode)
def test_vllm_refuses_logit_bias_with_drafts_in_every_mode(outcome: Outcome, mode: Mode):
    assert "not yet supported with speculative decoding" in str(outcome[mode].refused)


@scenario("n-gram")
def test_method_that_cannot_be_asynchronous_runs_synchronously_and_says_so(outcome: Outcome):
    said = re.findall(r"^.*ngram.*disabled.*$", outcome.logs[Mode.PLUGIN], re.MULTILINE)
    assert len(said) == 1, said
