"""What becomes of the plugin's runner with a mistake in structured output, or in log-probabilities."""

import dataclasses
from typing import Any

import numpy as np

MISTAKES = {
    "no mask": ("grammar", "masks are not applied"),
    "another row": ("grammar", "each mask is applied a row too low"),
    "drafts of before": ("grammar", "masks are made along the drafts of the step before"),
    "logprobs of before": ("logprobs", "log-probabilities are those of the step before"),
}
"""By name: the wish that shows it, and what is done wrong."""


def featured(plugins: Any, mistake: str) -> Any:
    """The class that is made of the plugin's class of a release, with one of `MISTAKES`."""

    class Faulty(plugins):  # type: ignore[misc]
        _drafts_before: Any = None
        _logprobs_before: Any = None

        def sample_tokens(self, grammar_output: Any) -> Any:
            if grammar_output is not None and mistake == "no mask":
                grammar_output = None
            elif grammar_output is not None and mistake == "another row":
                moved = np.roll(grammar_output.grammar_bitmask, 1, axis=0)
                grammar_output = dataclasses.replace(grammar_output, grammar_bitmask=moved)
            return super().sample_tokens(grammar_output)

        def take_draft_token_ids(self) -> Any:
            taken = super().take_draft_token_ids()
            if mistake != "drafts of before":
                return taken
            before, self._drafts_before = self._drafts_before, taken
            if before is None:
                return taken
            drafts = dict(zip(before.req_ids, before.draft_token_ids, strict=True))
            kept = zip(taken.req_ids, taken.draft_token_ids, strict=True)
            tokens = [list(drafts.get(name, own)) for name, own in kept]
            return dataclasses.replace(taken, draft_token_ids=tokens)

        def _sample(self, *args: Any, **kwargs: Any) -> Any:
            made = super()._sample(*args, **kwargs)
            if mistake == "logprobs of before":
                before, self._logprobs_before = self._logprobs_before, made.logprobs_tensors
                rows = None if before is None else before.logprob_token_ids.shape
                if made.logprobs_tensors is not None and rows == made.logprobs_tensors.logprob_token_ids.shape:
                    made.logprobs_tensors = before
            return made

    return Faulty
