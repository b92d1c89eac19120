"""Mistakes in stock's runner that carries positions on the device (0.19 and later): classes to derive before it."""

import contextlib
from typing import Any


class _NoCorrection:
    """positions and lengths stay those of a host that takes all drafts for accepted"""

    def _copy_valid_sampled_token_count(self: Any, next_token_ids: Any, counts: Any) -> None:
        super()._copy_valid_sampled_token_count(next_token_ids, counts)  # type: ignore[misc]
        self.valid_sampled_token_count_gpu = None


class _StaleDrafts:
    """the drafts that are verified are those of the step before"""

    _before: Any = None

    def propose_draft_token_ids(self: Any, *args: Any, **kwargs: Any) -> Any:
        drafts = super().propose_draft_token_ids(*args, **kwargs)  # type: ignore[misc]
        before, self._before = self._before, drafts
        return before if before is not None and before.shape == drafts.shape else drafts


class _StaleCounts:
    """the counts of accepted drafts are those of the step before"""

    _before: Any = None

    def _copy_valid_sampled_token_count(self: Any, next_token_ids: Any, counts: Any) -> None:
        super()._copy_valid_sampled_token_count(next_token_ids, counts)  # type: ignore[misc]
        if self._before is not None and self._before.shape == counts.shape:
            self.valid_sampled_token_count_gpu = self._before
        self._before = counts


class _NoFence:
    """a pinned buffer is filled again while the device may have yet to copy it"""

    def synchronize_input_prep(self: Any) -> Any:
        return contextlib.nullcontext()


class _LongDrafts:
    """draft steps count rejected tokens in the lengths that attention reads"""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        propose = self.drafter.propose
        self.drafter.propose = lambda **given: propose(**given | {"num_rejected_tokens_gpu": None})


MISTAKES: dict[str, type] = {
    "no correction": _NoCorrection,
    "stale drafts": _StaleDrafts,
    "stale counts": _StaleCounts,
    "no fence": _NoFence,
    "long drafts": _LongDrafts,
}
