"""Speculative decoding in vLLM with no host-device synchronisation on the critical path.

Importing this package imports PyTorch, but neither vLLM nor transformers, and starts no CUDA context.
"""

from vllm_async_spec._version import __version__
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
