"""What a table of the suite counts, and which batches a declaration excludes, in lines below the table."""

from __future__ import annotations

from vllm_async_spec.compat.cases import CASES, DRAFT_TOKENS
from vllm_async_spec.compat.report import Run

LEGEND = (
    f"batches: how many of the {len(CASES)} kinds of batches that vLLM's engine makes were built, with each model, and "
    f"how many for a builder's own thresholds and updates. The kinds, with K = {DRAFT_TOKENS} draft tokens: "
    f"{'; '.join(case.name for case in CASES)}. A kind that fails is a fault."
)
"""What the column `batches` counts."""

EXCLUDED = "Not built, because of what a builder declares or is for:"
"""What stands above the lines of `excluded`."""

_FEW = 6


def excluded(run: Run) -> list[str]:
    """Which batches were not built as they are, for which builders, and the declaration that allows it."""
    found: dict[tuple[str, str], list[str]] = {}
    for row in run.rows:
        for reasons, said in ((row.not_run, ""), (row.unpadded, " without padding rows")):
            for reason, cases in reasons.items():
                found.setdefault((reason, _listed(cases, row.batches // max(1, len(row.models))) + said), []).append(
                    row.backend
                )
    return [f"  {', '.join(names)}: {cases} ({reason})" for (reason, cases), names in found.items()]


def _listed(cases: list[str], batches: int) -> str:
    """The batches by name; of most batches, those that are left."""
    left = [case.name for case in CASES if case.name not in cases]
    if len(cases) > _FEW and len(cases) + len(left) == batches and len(left) <= _FEW:
        return f"all but {'; '.join(left)}"
    return "; ".join(cases)
