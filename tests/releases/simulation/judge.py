"""What is wrong with a run: against what must hold of any run, and against another run of the same schedule."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np

from simulation.engine import Engine, Step
from simulation.model import Seen, greedy
from simulation.schedule import Schedule
from simulation.shape import BLOCK, LONGEST
from simulation.wishes import PLAIN


def mistakes(engine: Engine, schedule: Schedule, *, waited: bool = True) -> Iterator[str]:
    """The mistakes of a finished run, oldest first, by the scheduler's output and the sampled tokens.

    `waited`: a step that needs exact counts had them on the host. Stock's runner from 0.19 on has bounds then, and
    forgets tokens of requests in such a batch that need none.
    """
    engine.gpu.finish()
    requests, wishes = schedule.requests, schedule.wishes
    truth = {
        name: [*prompt, *greedy(prompt, LONGEST, stop, LONGEST + 1, wishes.get(name, PLAIN), stops=False)]
        for name, (prompt, _, stop) in requests.items()
    }
    before: Step | None = None
    for number, (step, at, wait) in enumerate(zip(engine.steps, began(engine), waits(engine, schedule), strict=True)):
        for mistake in _of_step(step, before, at, truth, requests, wait=wait is not None, waited=waited):
            yield f"step {number}: {mistake}"
        before = step
    for name, (prompt, count, stop) in requests.items():
        wanted, got = greedy(prompt, count, stop, LONGEST, wishes.get(name, PLAIN)), engine.outputs.get(name, [])
        ended = engine.finished.get(name)
        if got != (wanted[: len(got)] if ended == "abort" else wanted):
            yield f"{name}, ended by {ended}, has the tokens {got} instead of {wanted}"
        if wishes.get(name, PLAIN).logprobs and (of := engine.logprobs.get(name, [])) != got:
            yield f"{name} has log-probabilities of the tokens {of} instead of {got}"


def began(engine: Engine) -> Iterator[dict[str, int]]:
    carried: dict[str, int] = {}
    for step in engine.steps:
        at = {name: carried.get(name, step.scheduled["computed"][name]) for name in step.rows}
        at |= {name: step.scheduled["computed"][name] for name in step.scheduled["resumed"]}
        yield at
        # Whose rejections the scheduler has not heard of goes on from here; for the others it says where.
        carried = {name: at[name] + advance for name, advance in _advances(step) if step.scheduled["drafts"].get(name)}


def waits(engine: Engine, schedule: Schedule) -> Iterator[str | None]:
    """For each step why it must wait for the accepted counts of the step before, in the plugin's words, or None."""
    reason: str | None = None
    for step, at in zip(engine.steps, began(engine), strict=True):
        yield reason
        if not step.rows:
            continue  # nothing has run since
        reason = None
        wishes = {name: schedule.wishes.get(name, PLAIN) for name in step.rows}
        if step.scheduled["drafts"]:
            found = (
                ("penalties", any(each.penalties for each in wishes.values())),
                ("bad words", any(each.bad_words for each in wishes.values())),
                ("min_tokens", any(_outputs(step, name, at[name]) < each.min_tokens for name, each in wishes.items())),
            )
            reason = next((name for name, holds in found if holds), None)


def _outputs(step: Step, name: str, at: int) -> int:
    """How many output tokens a request has when a step begins; the scheduler counts drafts in flight among them."""
    optimism = step.scheduled["computed"][name] - at
    return int(step.scheduled["outputs"].get(name, 0)) - optimism


def _advances(step: Step) -> Iterator[tuple[str, int]]:
    for row, name in enumerate(step.rows):
        tokens, drafts = step.scheduled["tokens"][name], step.scheduled["drafts"].get(name, 0)
        accepted = int((step.sampled[row] >= 0).sum()) - 1
        yield name, tokens - (drafts - accepted if drafts else 0)


def _of_step(
    step: Step, before: Step | None, at: Mapping[str, int], truth: Any, requests: Any, *, wait: bool, waited: bool
) -> Iterator[str]:
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
        discard = at[name] + count < len(requests[name][0]) + _outputs(step, name, at[name])
        if bool(step.device["discard"][row]) != discard:
            yield f"the sample of {name} is {'kept' if discard else 'discarded'}"
        yield from _host(
            step, name, at[name], 0 if wait and waited else _in_flight(step, before, name), forgets=not waited
        )
    sampled = [range(int(end) - drafted - 1, int(end)) for end, drafted in zip(ends, drafts, strict=True)]
    indices = [index for each in sampled for index in each]
    yield from _differ("logits_indices", step.device["logits_indices"], indices, [""], [len(indices)])


def _in_flight(step: Step, before: Step | None, name: str) -> int:
    """Drafts of which the host can't know whether they are accepted."""
    if step.first or before is None or name not in before.rows or name in step.scheduled["resumed"]:
        return 0
    return int(before.scheduled["drafts"].get(name, 0))


def _host(step: Step, name: str, at: int, slack: int, *, forgets: bool) -> Iterator[str]:
    """The runner's own account: exact where nothing is in flight and in a step that has waited, else a bound."""
    for field in ("num_computed_tokens", "num_computed_tokens_cpu"):
        if not at <= step.host[name][field] <= at + slack:
            yield f"{field} of {name} is {step.host[name][field]} where {at} are computed and {slack} drafts in flight"
    outputs, held = _outputs(step, name, at), len(step.host[name]["output_token_ids"])
    if not (forgets or outputs <= held) or held > outputs + slack:
        yield f"output_token_ids of {name} has {held} tokens where there are {outputs} and {slack} drafts in flight"


def _differ(what: str, got: Any, wanted: Any, names: Sequence[str], counts: Sequence[int]) -> Iterator[str]:
    got, wanted = np.asarray(got), np.asarray(wanted)
    if got.shape != wanted.shape:
        yield f"{what} has the shape {got.shape} instead of {wanted.shape}"
    elif (got != wanted).any():
        at = int((got != wanted).argmax())
        row = int(np.searchsorted(np.cumsum(counts), at, side="right"))
        yield f"{what} of {names[row]} (row {row}) is {got[at]} instead of {wanted[at]} at {at}"


def differences(stock: Engine, subject: Engine, schedule: Schedule) -> Iterator[str]:
    """Differences of two finished runs of one schedule, oldest first: what the device read and the host holds."""
    stock.gpu.finish()
    subject.gpu.finish()
    before: Step | None = None
    for number, (one, other, wait) in enumerate(zip(stock.steps, subject.steps, waits(stock, schedule), strict=False)):
        for difference in chain(_between(one, other), _between_hosts(one, other, before, wait is not None)):
            yield f"step {number}: {difference}"
        before = one
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


def _between_hosts(stock: Step, subject: Step, before: Step | None, waited: bool) -> Iterator[str]:
    """What the runner holds of each request that has nothing in flight, or of all in a step that has waited.

    `num_tokens_no_spec` may rightly be more than stock's, which falls behind until vLLM cuts a list of output tokens;
    the plugin's lists are too long in nearly every step. Nothing is read between the two numbers.
    """
    if stock.places != subject.places:
        yield f"req_id_to_index is {subject.places} instead of {stock.places}"
    for name in stock.rows:
        if not waited and _in_flight(stock, before, name):
            continue
        one, other = stock.host[name], subject.host[name]
        for kept in ("num_computed_tokens", "num_computed_tokens_cpu", "output_token_ids", "block_ids"):
            if one[kept] != other[kept]:
                yield f"{kept} of {name} is {other[kept]} instead of {one[kept]}"
        least, tokens = one["num_tokens_no_spec"], one["num_prompt_tokens"] + len(one["output_token_ids"])
        if not least <= other["num_tokens_no_spec"] <= tokens:
            yield f"num_tokens_no_spec of {name} is {other['num_tokens_no_spec']} instead of {least} to {tokens}"
        known = one["token_ids_cpu"][:least] >= 0  # the others are placeholders
        yield from _unequal(
            f"token_ids_cpu of {name}", one["token_ids_cpu"][:least][known], other["token_ids_cpu"][:least][known]
        )


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
