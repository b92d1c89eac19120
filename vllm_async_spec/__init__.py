"""Speculative decoding in vLLM with no host-device synchronisation on the critical path.

Importing this package imports nothing else. The first use of a public name imports PyTorch, but neither vLLM nor
transformers, and starts no CUDA context.
"""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING

from vllm_async_spec._version import __version__

if TYPE_CHECKING:
    from vllm_async_spec.host_copy import Epoch, HostCopy, PinnedRing
    from vllm_async_spec.metadata import CommonAttentionMetadata, MetadataError
    from vllm_async_spec.sync_policy import (
        HostSyncError,
        HostSyncWarning,
        SyncPolicy,
        SyncReport,
        current_sync_policy,
        reset_sync_report,
        set_sync_policy,
        sync_policy,
        sync_report,
    )

__all__ = [
    "CommonAttentionMetadata",
    "Epoch",
    "HostCopy",
    "HostSyncError",
    "HostSyncWarning",
    "MetadataError",
    "PinnedRing",
    "SyncPolicy",
    "SyncReport",
    "__version__",
    "current_sync_policy",
    "reset_sync_report",
    "set_sync_policy",
    "sync_policy",
    "sync_report",
]

_IN_MODULE = {
    "host_copy": ("Epoch", "HostCopy", "PinnedRing"),
    "metadata": ("CommonAttentionMetadata", "MetadataError"),
    "sync_policy": (
        "HostSyncError",
        "HostSyncWarning",
        "SyncPolicy",
        "SyncReport",
        "current_sync_policy",
        "reset_sync_report",
        "set_sync_policy",
        "sync_policy",
        "sync_report",
    ),
}
_MODULE_OF = {name: module for module, names in _IN_MODULE.items() for name in names}


class _Package(ModuleType):
    """This package, whose public names are imported when they are first used."""

    @property
    def sync_policy(self) -> object:
        """The public function. Python would bind the submodule of the same name here."""
        return importlib.import_module(f"{__name__}.sync_policy").sync_policy

    @sync_policy.setter
    def sync_policy(self, value: object) -> None:
        if not isinstance(value, ModuleType):
            raise AttributeError(f"{__name__}.sync_policy can't be replaced; replace it in the module that uses it")

    def __getattr__(self, name: str) -> object:
        if name not in _MODULE_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
        setattr(self, name, value)
        return value

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *__all__})


sys.modules[__name__].__class__ = _Package
