"""What a run has been through, so that a load can't pass for one that it is not."""

from collections.abc import Iterator
from itertools import pairwise

from simulation.engine import Engine, Step

EVERYTHING = frozenset(
    {
        "a request was preempted, and resumed",
        "the prefix cache was reset",
        "a prompt was found in the prefix cache",
        "a request was aborted",
        "a request ended at its length",
        "a request ended at its stop token",
        "a prompt was cut in chunks",
        "a request changed its row",
        "a request came back that had not been scheduled",
        "drafts were dropped",
        "a step had no drafts",
        *(f"{rejected} of 3 drafts were rejected" for rejected in range(4)),
        "0 of 5 drafts were rejected",
        "5 of 5 drafts were rejected",
    }
)


def happened(engine: Engine) -> set[str]:
    ends = {"abort": "was aborted", "length": "ended at its length", "stop": "ended at its stop token"}
    seen = {f"a request {ends[end]}" for end in engine.finished.values() if end in ends}
    if engine.resets:
        seen.add("the prefix cache was reset")
    for before, step in pairwise(engine.steps):
        seen |= set(_between(before, step))
    return seen


def _between(before: Step, step: Step) -> Iterator[str]:
    scheduled = step.scheduled
    if scheduled["resumed"]:
        yield "a request was preempted, and resumed"
    if not step.rows:
        return
    if not scheduled["drafts"]:
        yield "a step had no drafts"
    if step.device["discard"].any():
        yield "a prompt was cut in chunks"
    for row, name in enumerate(step.rows):
        drafts = scheduled["drafts"].get(name, 0)
        if drafts:
            yield f"{drafts + 1 - int((step.sampled[row] >= 0).sum())} of {drafts} drafts were rejected"
        if name in before.rows:
            if before.rows.index(name) != row:
                yield "a request changed its row"
            if before.scheduled["drafts"].get(name, 0) > drafts:
                yield "drafts were dropped"
        elif name in scheduled["outputs"] and name not in scheduled["resumed"]:
            yield "a request came back that had not been scheduled"
        elif name not in scheduled["outputs"] and scheduled["computed"][name]:
            yield "a prompt was found in the prefix cache"
