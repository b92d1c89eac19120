"""What is wrong with a run: against what must hold of any run, and against another run of the same schedule."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from simulation.engine import BLOCK, LONGEST, Engine, Step
from simulation.model import Seen, greedy


def mistakes(engine: Engine, requests: Mapping[str, tuple[Sequence[int], int, int]]) -> Iterator[str]:
    """Compare a finished run with what follows from the scheduler's output and from the tokens that were sampled.

    Args:
        engine: Idle.
        requests: By name: prompt, number of tokens, stop token.

    Yields:
        A sentence for each mistake, oldest first.
    """
    engine.gpu.finish()
    truth = {name: [*prompt, *greedy(prompt, LONGEST, -1, LONGEST + 1)] for name, (prompt, _, _) in requests.items()}
    carried: dict[str, int] = {}
    before: Step | None = None
    for number, step in enumerate(engine.steps):
        at = {name: carried.get(name, step.scheduled["computed"][name]) for name in step.rows}
        at |= {name: step.scheduled["computed"][name] for name in step.scheduled["resumed"]}
        for mistake in _of_step(step, before, at, truth, requests):
            yield f"step {number}: {mistake}"
        # Whose rejections the scheduler has not heard of goes on from here; for the others it says where.
        carried = {name: at[name] + advance for name, advance in _advances(step) if step.scheduled["drafts"].get(name)}
        before = step
    for name, (prompt, count, stop) in requests.items():
        wanted, got = greedy(prompt, count, stop, LONGEST), engine.outputs.get(name, [])
        ended = engine.finished.get(name)
        if got != (wanted[: len(got)] if ended == "abort" else wanted):
            yield f"{name}, ended by {ended}, has the tokens {got} instead of {wanted}"


def _advances(step: Step) -> Iterator[tuple[str, int]]:
    """By how many tokens each request is further after the step."""
    for row, name in enumerate(step.rows):
        tokens, drafts = step.scheduled["tokens"][name], step.scheduled["drafts"].get(name, 0)
        accepted = int((step.sampled[row] >= 0).sum()) - 1
        yield name, tokens - (drafts - accepted if drafts else 0)


def _of_step(step: Step, before: Step | None, at: Mapping[str, int], truth: Any, requests: Any) -> Iterator[str]:
    if not step.rows:
        return
    counts = [step.scheduled["tokens"][name] for name in step.rows]
    drafts = [step.scheduled["drafts"].get(name, 0) for name in step.rows]
    ends = np.cumsum(counts)
    target = step.calls[0]
    values = target.values
    positions = np.concatenate([np.arange(at[n], at[n] + c) for n, c in zip(step.rows, counts, strict=True)])
    for axis in values["positions"].reshape(-1, values["positions"].shape[-1]):
        yield from _differ("positions", axis[: ends[-1]], positions, step.rows, counts)
    for group, lens in enumerate(values["seq_lens"]):
        exact = [at[name] + count for name, count in zip(step.rows, counts, strict=True)]
        yield from _differ(f"seq_lens of group {group}", lens[: len(counts)], exact, step.rows, [1] * len(counts))
        bound = target.host["max_seq_len"][group]
        if not max(exact) <= bound <= max(exact) + max(_in_flight(step, before, name) for name in step.rows):
            yield f"max_seq_len of group {group} is {bound} where the longest is {max(exact)}"
        starts = values["query_start_loc"][group][: len(counts) + 1]
        yield from _differ("query_start_loc", starts, [0, *ends], ["", *step.rows], [1] * (len(counts) + 1))
        table, slots = np.asarray(values["block_table_tensor"][group]), []
        for row, (name, count) in enumerate(zip(step.rows, counts, strict=True)):
            blocks = step.scheduled["blocks"][name][group]
            # A block that has left the window is the scheduler's null block; the runner need not know.
            given = [id if id else int(table[row, place]) for place, id in enumerate(blocks)]
            yield from _differ(f"block_table of group {group}", table[row, : len(blocks)], given, [name], [len(blocks)])
            yield from _differ(
                f"block_ids of group {group}",
                step.host[name]["block_ids"][group][: len(blocks)],
                [id if id else step.host[name]["block_ids"][group][place] for place, id in enumerate(blocks)],
                [name],
                [len(blocks)],
            )
            slots += [int(table[row, p // BLOCK]) * BLOCK + p % BLOCK for p in range(at[name], at[name] + count)]
        yield from _differ(
            f"slot_mapping of group {group}", values["slot_mapping"][group][: ends[-1]], slots, step.rows, counts
        )
    for row, (name, count, drafted) in enumerate(zip(step.rows, counts, drafts, strict=True)):
        first = int(ends[row]) - count
        wanted = list(truth[name][at[name] : at[name] + count - drafted])
        if drafted and before is not None and name in before.rows and name not in step.scheduled["resumed"]:
            wanted += before.drafts[before.rows.index(name)][:drafted].tolist()
        yield from _differ("input_ids", values["input_ids"][first : first + len(wanted)], wanted, [name], [len(wanted)])
        optimism = step.scheduled["computed"][name] - at[name]
        discard = at[name] + count < len(requests[name][0]) + step.scheduled["outputs"].get(name, 0) - optimism
        if bool(step.device["discard"][row]) != discard:
            yield f"the sample of {name} is {'kept' if discard else 'discarded'}"
        yield from _host(step, before, name, at[name], drafted)
    sampled = [range(int(end) - drafted - 1, int(end)) for end, drafted in zip(ends, drafts, strict=True)]
    indices = [index for each in sampled for index in each]
    yield from _differ("logits_indices", step.device["logits_indices"], indices, [""], [len(indices)])


def _in_flight(step: Step, before: Step | None, name: str) -> int:
    """Drafts of which the host can't know whether they are accepted."""
    if step.first or before is None or name not in before.rows or name in step.scheduled["resumed"]:
        return 0
    return int(before.scheduled["drafts"].get(name, 0))


def _host(step: Step, before: Step | None, name: str, at: int, drafted: int) -> Iterator[str]:
    """The runner's own account: exact where nothing is in flight, else a bound."""
    slack = _in_flight(step, before, name)
    for field in ("num_computed_tokens", "num_computed_tokens_cpu"):
        if not at <= step.host[name][field] <= at + slack:
            yield f"{field} of {name} is {step.host[name][field]} where {at} are computed and {slack} drafts in flight"


def _differ(what: str, got: Any, wanted: Any, names: Sequence[str], counts: Sequence[int]) -> Iterator[str]:
    got, wanted = np.asarray(got), np.asarray(wanted)
    if got.shape != wanted.shape:
        yield f"{what} has the shape {got.shape} instead of {wanted.shape}"
    elif (got != wanted).any():
        at = int((got != wanted).argmax())
        row = int(np.searchsorted(np.cumsum(counts), at, side="right"))
        yield f"{what} of {names[row]} (row {row}) is {got[at]} instead of {wanted[at]} at {at}"


def differences(stock: Engine, subject: Engine) -> Iterator[str]:
    """Compare two finished runs of one schedule, all that the device read in every step.

    Yields:
        A sentence for each difference, oldest first.
    """
    stock.gpu.finish()
    subject.gpu.finish()
    for number, (one, other) in enumerate(zip(stock.steps, subject.steps, strict=False)):
        for difference in _between(one, other):
            yield f"step {number}: {difference}"
    if len(stock.steps) != len(subject.steps):
        yield f"{len(subject.steps)} steps instead of {len(stock.steps)}"
    for name, tokens in stock.outputs.items():
        if subject.outputs[name] != tokens or subject.finished.get(name) != stock.finished.get(name):
            yield f"{name} ends as {subject.outputs[name]} ({subject.finished.get(name)}) instead of {tokens}"


def _between(stock: Step, subject: Step) -> Iterator[str]:
    if stock.scheduled != subject.scheduled:
        keys = [key for key in stock.scheduled if stock.scheduled[key] != subject.scheduled[key]]
        yield f"scheduled otherwise: {keys}"
        return
    if stock.rows != subject.rows:
        yield f"the rows are {subject.rows} instead of {stock.rows}"
        return
    for name, value in stock.device.items():
        yield from _unequal(name, value, subject.device.get(name))
    yield from _unequal("sampled_token_ids", stock.sampled, subject.sampled)
    yield from _unequal("draft_token_ids", stock.drafts, subject.drafts)
    if [call.layer for call in stock.calls] != [call.layer for call in subject.calls]:
        yield f"the models called are {[call.layer for call in subject.calls]}"
        return
    for one, other in zip(stock.calls, subject.calls, strict=True):
        for difference in _between_calls(one, other):
            yield f"{one.layer}: {difference}"


def _between_calls(stock: Seen, subject: Seen) -> Iterator[str]:
    for name, value in stock.values.items():
        if name in ("input_ids", "positions"):
            yield from _unequal(name, value, subject.values[name])
            continue
        for group, (one, other) in enumerate(zip(value, subject.values[name], strict=True)):
            if name == "block_table_tensor":
                # Columns past the length hold what earlier requests left there.
                used = [-(-int(length) // BLOCK) for length in stock.values["seq_lens"][group]]
                one, other = ([row[:count] for row, count in zip(t.tolist(), used, strict=False)] for t in (one, other))
                if one != other:
                    yield f"block_table of group {group} is {other} instead of {one}"
            else:
                yield from _unequal(f"{name} of group {group}", one, other)
    for name, value in stock.host.items():
        if name != "max_seq_len" and value != subject.host[name]:
            yield f"{name} is {subject.host[name]} instead of {value}"


def _unequal(name: str, one: Any, other: Any) -> Iterator[str]:
    if one is None or other is None or np.shape(one) != np.shape(other):
        if one is not other:
            yield f"{name} is {other} instead of {one}"
    elif (np.asarray(one) != np.asarray(other)).any():
        yield f"{name} is {np.asarray(other).tolist()} instead of {np.asarray(one).tolist()}"
