"""The ledger on a real vLLM release."""

import pytest

from vllm_async_spec.compat import builders
from vllm_async_spec.vllm_plugin.ledger import Match, State, ledger_directory, load_ledger, verify
from vllm_async_spec.vllm_plugin.ledger.entries import read_lock
from vllm_async_spec.vllm_plugin.ledger.verify import updated_lock


@pytest.mark.parametrize("spec", load_ledger(), ids=lambda spec: spec.name)
def test_a_patch_is_applied_exactly_where_its_ledger_entry_says(ledger, release, spec):
    """test_still_needed.py says whether the entry names the right releases."""
    outcome = ledger.outcomes[spec.name]
    if release not in spec.releases:
        why = f"vLLM {release} is not among its releases"
        assert (outcome.state, outcome.detail) == (State.NOT_NEEDED, why)
    elif spec.name in ("async-scheduling-cpu", "cpu-sampling", "cpu-sampling-top-k"):
        assert (outcome.state, outcome.detail) == (State.NOT_NEEDED, "the platform is not the CPU")
    else:
        assert outcome.state is State.APPLIED, outcome.detail
        assert outcome.release is not None


def test_the_source_verifies(vllm_source, release):
    for verdict in verify(load_ledger(), vllm_source):
        expected = Match.SAME if release in _spec(verdict.patch).releases else Match.NOT_NEEDED
        assert verdict.match is expected, verdict


def test_the_lock_file_has_what_an_update_from_this_source_writes(vllm_source):
    lock = read_lock(ledger_directory())
    assert updated_lock(load_ledger(), lock, vllm_source) == lock


def test_installing_again_changes_nothing(ledger):
    cls = builders.common_metadata_class()
    before = dict(vars(cls))
    ledger.install()
    assert dict(vars(cls)) == before


def _spec(name):
    return next(spec for spec in load_ledger() if spec.name == name)
