"""The patch ledger: the TOML entries in patches/, and each patch's state in this process."""

from vllm_async_spec.vllm_plugin.ledger.applying import Implementation, Ledger, Outcome, State
from vllm_async_spec.vllm_plugin.ledger.counting import count_states, summary
from vllm_async_spec.vllm_plugin.ledger.entries import (
    PatchError,
    PatchSpec,
    Target,
    find_patch,
    known_releases,
    ledger_directory,
    load_ledger,
    read_ledger,
    release_order,
    release_runs,
)
from vllm_async_spec.vllm_plugin.ledger.verify import Match, Verdict, source_release, verify

__all__ = [
    "Implementation",
    "Ledger",
    "Match",
    "Outcome",
    "PatchError",
    "PatchSpec",
    "State",
    "Target",
    "Verdict",
    "count_states",
    "find_patch",
    "known_releases",
    "ledger_directory",
    "load_ledger",
    "read_ledger",
    "release_order",
    "release_runs",
    "source_release",
    "summary",
    "verify",
]
