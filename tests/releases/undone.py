"""Applying patches for a while: a ledger never takes back what it has applied, and these tests share one process."""

import contextlib
import importlib
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from vllm_async_spec.patching import Transaction
from vllm_async_spec.vllm_plugin.audit_agent import agent as audit_agent
from vllm_async_spec.vllm_plugin.ledger import Ledger, State, find_patch, load_ledger
from vllm_async_spec.vllm_plugin.patches.implementations import IMPLEMENTATIONS

ALL = IMPLEMENTATIONS | audit_agent.IMPLEMENTATIONS


@contextlib.contextmanager
def undone() -> Iterator[pytest.MonkeyPatch]:
    """All that patches change in here is put back at the end, and then all that the monkeypatch has changed."""
    kept: list[Transaction] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Transaction, "__enter__", lambda self: kept.append(self) or self)
        yield patch
        for transaction in reversed(kept):
            transaction.roll_back()


def module_of(release: str, patch: str, module: str = "vllm.v1.worker.gpu_model_runner") -> Any:
    """The release's module that a patch changes; the tests of a release that the patch is not for are skipped."""
    if release not in find_patch(patch).releases:
        pytest.skip(f"{patch} is not for {release}")
    return importlib.import_module(module)


def ledger_of(patches: Iterable[str]) -> Ledger:
    """A ledger of these patches, and of those of the metadata, which they may need."""
    names = {*patches, *(name for name in IMPLEMENTATIONS if name.startswith("metadata"))}
    specs = [spec for spec in load_ledger() if spec.name in names]
    return Ledger({name: ALL[name] for name in names}, specs, release=importlib.import_module("vllm").__version__)


@contextlib.contextmanager
def applied(*patches: str) -> Iterator[None]:
    """These patches are applied within, or it fails with the reason why one is not."""
    with undone():
        ledger = ledger_of(patches)
        ledger.install()
        for name in patches:
            assert ledger.outcomes[name].state is State.APPLIED, ledger.outcomes[name].detail
        yield
