"""What becomes of the plugin's runner with a mistake in how it goes exact, and back."""

from typing import Any

MISTAKES = {
    "outputs not cut": ("outputs keep the placeholders of drafts that were rejected", "output_token_ids"),
    "never exact": ("no step waits, whatever the batch has asked for", "has the tokens"),
    "optimistic numbers": ("a step waits, and then takes all drafts for accepted", "num_computed_tokens"),
    "never back": ("once a step has waited, all do", "fallbacks"),
}
"""By name: what is done wrong, and the word in a report that shows it."""


def exact(plugins: Any, mistake: str) -> Any:
    """The class that is made of the plugin's class of a release, with one of `MISTAKES`."""

    class Faulty(plugins):  # type: ignore[misc]
        _wanted: str | None = None

        @property
        def _exact(self) -> str | None:
            return None if mistake == "never exact" else self._wanted

        @_exact.setter
        def _exact(self, reason: str | None) -> None:
            if mistake == "never back" and reason is None and self._wanted is not None:
                self._progress.fetch(self.input_batch.num_reqs)
                return
            self._wanted = reason

        def _reconciled(self, counts: list[int], began: list[int]) -> list[int]:
            outputs = {name: list(request.output_token_ids) for name, request in self.requests.items()}
            made: list[int] = super()._reconciled(counts, began)
            if mistake == "outputs not cut":
                for name, tokens in outputs.items():
                    self.requests[name].output_token_ids[:] = tokens
            return self._progress.most_counts(len(counts)) if mistake == "optimistic numbers" else made

    return Faulty
