"""The plugin's state in this process."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_async_spec.vllm_plugin.ledger import Ledger
from vllm_async_spec.vllm_plugin.settings import Settings
from vllm_async_spec.vllm_plugin.strict import Strictness


@dataclass(slots=True)
class Plugin:
    """The plugin in this process: its settings, and the patches that they allow."""

    settings: Settings
    ledger: Ledger | None = None
    """None if no patch is allowed: the mode is `off` and audits are off."""
    failure: str | None = None
    """Why no patch is applied although the mode allows patches, or None."""
    strictness: Strictness | None = None
    """Remembers refusals; only in the mode `strict`."""
    chose_runner: bool = False
    """Whether the plugin told vLLM in this process which model runner to take."""
    runner_refused: str | None = None
    """Why vLLM can't take the runner that the user asked for, or None."""


_plugin: Plugin | None = None


def active_plugin() -> Plugin | None:
    """The plugin of this process, or None before it is loaded."""
    return _plugin


def activate(plugin: Plugin) -> None:
    """Make this the plugin of this process."""
    global _plugin
    _plugin = plugin
