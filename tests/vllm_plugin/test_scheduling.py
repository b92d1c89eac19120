"""What is asked of vLLM's configuration leaves this process as it was."""

import logging
import os
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_async_spec.vllm_plugin.scheduling import Inquiry, is_asking


def test_an_inquiry_leaves_environment_arguments_and_log_as_they_were(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CHANGED", "before")
    monkeypatch.setenv("REMOVED", "before")
    before, disabled = dict(os.environ), logging.root.manager.disable

    def create(asked: Any) -> Any:
        """As vLLM's platforms do, and as vLLM adds to the configuration of drafts."""
        assert is_asking()
        assert logging.root.manager.disable == logging.CRITICAL
        os.environ |= {"CHANGED": "after", "NEW": "after"}
        del os.environ["REMOVED"]
        asked.speculative_config["model"] = "of the target"
        return asked

    given = SimpleNamespace(speculative_config={"method": "mtp"}, async_scheduling=None)
    asked: Any = Inquiry(given, create).config(True)
    assert (asked.async_scheduling, given.async_scheduling) == (True, None)
    assert given.speculative_config == {"method": "mtp"}
    assert dict(os.environ) == before
    assert logging.root.manager.disable == disabled
    assert not is_asking()
