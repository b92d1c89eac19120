"""What asynchronous stopping costs the host in a step, counted without a clock: PyTorch operators, streams, events."""

from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_models
import torch
from generating import StopsOnceOn, late, may_wait
from late_device import LateChannel
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import EosTokenCriteria, MaxLengthCriteria, StoppingCriteriaList

from vllm_async_spec.generation.stopping_criteria import AsyncStoppingCriteriaList, HostCriteria
from vllm_async_spec.host_copy import PinnedRing

STEPS = 12
WARM = 4


class Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[str(func)] += 1
        return func(*args, **(kwargs or {}))


def operators(criteria: Any, batch: int) -> Counter[str]:
    """Those of `STEPS` steps: of the check, and of what transformers' loop does with its verdict."""
    pad = torch.tensor(0)
    pads = any(hasattr(each, "eos_token_id") for each in criteria)
    ids = torch.ones(batch, WARM + STEPS + 4, dtype=torch.long)
    given = [ids[:, : 4 + step] for step in range(WARM + STEPS)]
    tokens = unfinished = torch.ones(batch, dtype=torch.long)
    counted = Operators()
    for step, so_far in enumerate(given):
        if step == WARM:
            counted.__enter__()
        if pads:
            tokens = tokens * unfinished + pad * (1 - unfinished)
        unfinished = unfinished & ~criteria(so_far, None)
        assert not bool(unfinished.max() == 0)
    counted.__exit__(None, None, None)
    return counted.seen


def criteria_of(kind: str) -> list[Any]:
    ends = [EosTokenCriteria(torch.tensor([98]))] if kind != "several ends" else [EosTokenCriteria([96, 97, 98])]
    custom = [StopsOnceOn(99)] if kind == "custom" else []
    return [MaxLengthCriteria(10**6), *ends, *custom]


def as_in_transformers(kind: str, batch: int, channel: LateChannel, **options: Any) -> AsyncStoppingCriteriaList:
    """The list that transformers' loop is given."""
    return AsyncStoppingCriteriaList(
        criteria_of(kind), pads=batch > 1, starts_unfinished=True, open_channel=channel.open, **options
    )


CHECK = {
    # The newest token, its comparison, the rows that had stopped, and the copy; on the host, the loop's own two.
    ("one end", 1): 6,
    ("several ends", 1): 6,
    # A custom criterion, here of two operators, and one more to put it to the others.
    ("custom", 1): 9,
    # Rows that stop one by one: are all of them there, who is not; and the loop's four for pads.
    ("one end", 3): 12,
    ("several ends", 3): 12,
    ("custom", 3): 15,
}


@pytest.mark.parametrize(("kind", "batch"), list(CHECK))
def test_a_step_is_no_more_operators_than_the_synchronous_one(kind: str, batch: int):
    channel = LateChannel(1)
    own = as_in_transformers(kind, batch, channel)
    stock = operators(StoppingCriteriaList(criteria_of(kind)), batch)
    ours = operators(own, batch)
    assert channel.sent == WARM + STEPS, "nothing was asynchronous"
    assert ours.total() == STEPS * CHECK[kind, batch], ours
    assert ours.total() <= stock.total() - 3 * STEPS


@pytest.mark.parametrize("batch", [1, 3])
def test_flags_that_travel_together_are_no_more_operators_a_step(batch: int):
    own = as_in_transformers("one end", batch, LateChannel(1), poll_every=4)
    assert operators(own, batch).total() < operators(StoppingCriteriaList(criteria_of("one end")), batch).total()


@pytest.mark.parametrize("batch", [1, 3])
def test_ends_of_sequence_are_judged_on_the_generating_stream_and_all_else_beside_it(batch: int):
    for kind, besides in (("one end", 0), ("several ends", 0), ("custom", WARM + STEPS)):
        channel = LateChannel(1)
        operators(as_in_transformers(kind, batch, channel), batch)
        assert channel.besides == besides
        # Pads are the only reason for the generating stream to wait for the one beside it.
        assert channel.joins == (WARM + STEPS - 1 if besides and batch > 1 else 0)


@pytest.mark.parametrize("batch", [1, 2])
def test_one_row_gets_no_pads_because_what_follows_its_end_does_not_count(batch: int):
    model = tiny_models.model("llama")
    inputs = tiny_models.prompts([4] * batch)
    settings = {"max_new_tokens": 8, "eos_token_id": tiny_models.VOCABULARY, "pad_token_id": 0}
    seen = []
    for way in ({}, late(LateChannel(1))):
        with Operators() as counted:
            model.generate(**inputs, **settings, **way)
        seen.append(counted.seen["aten.rsub.Scalar"])
    stock, ours = seen
    assert stock >= 7
    assert ours == (0 if batch == 1 else stock)


@may_wait
def test_a_list_that_hides_an_end_heeds_it():
    end = EosTokenCriteria(torch.tensor([7]))
    limit = MaxLengthCriteria(50)
    for channel in (LateChannel(0).open, lambda *_: None):
        criteria = AsyncStoppingCriteriaList([limit, end], pads=False, open_channel=channel)
        assert list(criteria) == [limit]
        assert criteria.max_length == 50
        assert bool((~criteria(torch.tensor([[1, 2]]), None)).max() != 0)
        assert bool((~criteria(torch.tensor([[1, 2, 7]]), None)).max() == 0)
        criteria.finish()


# Fewer operators, and the same verdict


@may_wait
@pytest.mark.parametrize("seed", range(20))
def test_the_rows_that_stop_are_those_of_transformers(seed: int):
    chance = torch.Generator().manual_seed(seed)
    batch = seed % 4 + 1
    ids = torch.randint(12, (batch, 30), generator=chance)

    def some() -> Iterator[Any]:
        yield from (EosTokenCriteria([1]), EosTokenCriteria(2))[: 1 + seed % 2]
        if seed % 3 == 0:
            yield EosTokenCriteria(torch.tensor([3, 4]))
        if seed % 5 == 0:
            yield StopsOnceOn(5)

    stock = StoppingCriteriaList(some())
    own = AsyncStoppingCriteriaList(some(), max_in_flight=40, open_channel=LateChannel(10**6).open)
    unfinished = torch.ones(batch, dtype=torch.long)
    ours: Any = torch.ones(batch, dtype=torch.long)
    for length in range(4, 30):
        unfinished = unfinished & ~stock(ids[:, :length], None)
        ours = ours & ~own(ids[:, :length], None)
        assert (ours * 1).tolist() == unfinished.tolist()
        assert (ours * 1).dtype == unfinished.dtype


def test_whoever_says_how_many_tokens_are_new_is_understood():
    ids = torch.tensor([[1, 7, 2], [1, 2, 3], [7, 2, 2]])
    end = EosTokenCriteria(torch.tensor([7]))
    for new in (1, 2, 3):
        own = AsyncStoppingCriteriaList([end], open_channel=LateChannel(1).open)
        expected = StoppingCriteriaList([end])(ids, None, new_token_length=new)
        assert own(ids, None, new_token_length=new).tolist() == expected.tolist()


def test_a_length_is_asked_where_it_stops_or_warns(monkeypatch: pytest.MonkeyPatch):
    warned: list[str] = []
    logger = SimpleNamespace(warning_once=warned.append)
    monkeypatch.setattr("transformers.generation.stopping_criteria.logger", logger)
    host = HostCriteria([MaxLengthCriteria(9, max_position_embeddings=6)])
    found = []
    for length in range(4, 11):
        with Operators() as counted:
            stopped = host.stopped(length)
        found.append((stopped, bool(counted.seen), len(warned)))
    silent, warns, stops = (False, False, 0), (False, True), (True, True)
    assert found == [silent, silent, silent, (*warns, 1), (*warns, 2), (*stops, 2), (*stops, 2)]


# Events


class Event:
    made = 0

    def __init__(self) -> None:
        Event.made += 1
        self.recorded = 0

    def record(self, stream: Any) -> None:
        self.recorded += 1

    def query(self) -> bool:
        return True


def test_a_ring_makes_no_event_but_its_first(monkeypatch: pytest.MonkeyPatch):
    ring = PinnedRing((1,), torch.bool, depth=3, device="cpu")
    ring.device = torch.device("cuda")  # its buffers stay where they are
    monkeypatch.setattr(Event, "made", 0)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    fences = []
    for _ in range(9):
        ring.next()
        fences.append(ring.fence())
    assert Event.made == 3
    assert fences[:3] * 3 == fences
    assert [event.recorded for event in fences[:3]] == [3, 3, 3]
