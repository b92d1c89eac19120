"""What the plugin is in this process: its settings, its ledger, and why it did nothing where it did not."""

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
    """None where nothing may be patched: the mode is `off`, and no audit was asked for."""
    failure: str | None = None
    """Why nothing is patched though the mode asks for it."""
    strictness: Strictness | None = None
    """In the mode `strict`: what has been refused."""


_plugin: Plugin | None = None


def active_plugin() -> Plugin | None:
    """The plugin of this process, or None where nothing has loaded it."""
    return _plugin


def activate(plugin: Plugin) -> None:
    """Make this the plugin of this process."""
    global _plugin
    _plugin = plugin
