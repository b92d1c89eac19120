"""The ledger applied to the loaded release, as a fixture."""

import importlib
import sys

import fake_flashinfer
import pytest
from undone import undone

from vllm_async_spec.vllm_plugin.audit_agent import agent as audit_agent
from vllm_async_spec.vllm_plugin.ledger import Ledger, load_ledger
from vllm_async_spec.vllm_plugin.patches.implementations import IMPLEMENTATIONS


@pytest.fixture(scope="module")
def ledger(release: str):
    """The ledger, settled; everything is put back after this module."""
    fake_flashinfer.install()
    ledger = Ledger(IMPLEMENTATIONS | audit_agent.IMPLEMENTATIONS, load_ledger(), release=release)
    for outcome in ledger.outcomes.values():
        for module in outcome.modules:
            try:
                importlib.import_module(module)
            except ModuleNotFoundError:
                assert module not in sys.modules
    with undone():
        ledger.install()
        yield ledger
