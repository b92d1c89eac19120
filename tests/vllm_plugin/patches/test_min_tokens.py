"""The two parts of the patch min-tokens: output tokens without placeholders, and a wait that is counted."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_async_spec import reset_sync_report, sync_report
from vllm_async_spec.vllm_plugin.patches.min_tokens import Confirmed, CountedEvent

TOKENS = st.lists(st.integers(0, 50), max_size=6)


@given(TOKENS, st.integers(0, 4), st.integers(-8, 8), st.slices(6))
def test_confirmed_tokens_are_the_list_without_its_placeholders(
    tokens: list[int], placeholders: int, index: int, part: slice
):
    confirmed = Confirmed([*tokens, *[-1] * placeholders])
    assert len(confirmed) == len(tokens)
    assert list(confirmed) == tokens
    assert confirmed[part] == tokens[part]
    if -len(tokens) <= index < len(tokens):
        assert confirmed[index] == tokens[index]
    else:
        with pytest.raises(IndexError):
            confirmed[index]


def test_a_view_follows_the_tokens_that_replace_placeholders():
    tokens = [7, -1, -1]
    confirmed = Confirmed(tokens)
    assert len(confirmed) == 1
    tokens[1] = 8
    assert list(confirmed) == [7, 8]


def test_the_wait_is_made_and_counted_with_its_reason():
    waited: list[bool] = []
    reset_sync_report()
    CountedEvent(SimpleNamespace(synchronize=lambda: waited.append(True)), nbytes=64).synchronize()
    report = sync_report()
    assert waited == [True]
    assert report.fallbacks == {"min_tokens": 1}
    assert [(site.what, site.count) for site in report.sites] == [("sampled_token_ids", 1)]
