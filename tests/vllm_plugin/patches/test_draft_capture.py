"""Drafting that is replayed gives the drafts and keeps the keys of drafting that is launched, whatever came before."""

import gc
import weakref
from collections.abc import Callable, Mapping, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_async_spec.spec_decode.draft_graphs import (
    NO_SLOT,
    DraftGraphs,
    DraftInputs,
    DraftShape,
    batch_sizes,
)
from vllm_async_spec.streams import captured

PAGE, PAGES, DRAFTS, HIDDEN, ROWS = 4, 6, 3, 5, 7
TOKENS = DRAFTS + 1
SHAPE = DraftShape(ROWS, TOKENS, HIDDEN, PAGES, torch.float32)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
VOCABULARY = 997
Run = Callable[[], torch.Tensor]


class Drafter:
    """Drafts by integers of all that attention would read, over pages; like vLLM's it changes the lengths."""

    def __init__(self, device: str) -> None:
        self.keys = torch.zeros((1 + ROWS * PAGES) * PAGE, dtype=torch.int64, device=device)

    def __call__(self, given: Mapping[str, torch.Tensor], rows: int) -> torch.Tensor:
        starts, last = given["query_start_loc"], given["last_indices"].long()
        assert starts.shape[0] == rows + 1
        ids = given["token_ids"].long().view(rows, TOKENS).roll(-1, 1).flatten()
        ids = ids.index_put((last,), given["next_token_ids"].long())
        said = ids * 31 + given["positions"] + (given["hidden_states"] * 8).long().sum(1)
        self._keep(given["slot_mapping"], said)
        lengths, table = given["seq_lens"], given["block_table"].long()
        lengths -= given["rejected"]
        drafts = [self._attend(said[last], lengths, table)]
        positions = given["positions"][last]
        for _ in range(DRAFTS - 1):
            positions = positions + 1
            lengths += 1
            page = table.gather(1, (positions // PAGE).clamp(max=PAGES - 1)[:, None])[:, 0]
            said = drafts[-1] * 17 + positions
            self._keep(page * PAGE + positions % PAGE, said)
            drafts.append(self._attend(said, lengths, table))
        return torch.stack(drafts, dim=1)

    def _keep(self, slots: torch.Tensor, what: torch.Tensor) -> None:
        # What has no slot goes to page 0, without a question to the device.
        self.keys.index_put_((slots.clamp(min=0),), torch.where(slots == NO_SLOT, 0, what))

    def _attend(self, said: torch.Tensor, lengths: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        at = torch.arange(PAGES * PAGE, device=said.device)
        keys = self.keys[table[:, at // PAGE] * PAGE + at % PAGE]
        seen = torch.where(at < lengths[:, None], keys * (at + 1), 0).sum(1)
        return (said + seen) % VOCABULARY


def batch(rows: int, seed: int, device: str) -> dict[str, torch.Tensor]:
    source = torch.Generator().manual_seed(seed)

    def draw(*size: int, below: int = VOCABULARY) -> torch.Tensor:
        return torch.randint(below, size, generator=source)

    computed = draw(rows, below=PAGE * PAGES - 2 * TOKENS)
    table = torch.arange(1, 1 + ROWS * PAGES).view(ROWS, PAGES)[torch.randperm(ROWS, generator=source)[:rows]]
    positions = computed[:, None] + torch.arange(TOKENS)
    rejected = draw(rows, below=DRAFTS + 1)
    made = {
        "token_ids": draw(rows * TOKENS).int(),
        "positions": positions.flatten(),
        "hidden_states": torch.rand(rows * TOKENS, HIDDEN, generator=source),
        "slot_mapping": (table.gather(1, positions // PAGE) * PAGE + positions % PAGE).flatten(),
        "next_token_ids": draw(rows).int(),
        "last_indices": (torch.arange(rows) * TOKENS + DRAFTS - rejected).int(),
        "rejected": rejected.int(),
        "seq_lens": (computed + TOKENS).int(),
        "block_table": table.int(),
    }
    return {name: each.to(device) for name, each in made.items()}


def directly(drafter: Drafter, given: Mapping[str, torch.Tensor]) -> torch.Tensor:
    rows = len(given["rejected"])
    starts = (torch.arange(rows + 1, dtype=torch.int32) * TOKENS).to(given["rejected"].device)
    return drafter({**given, "seq_lens": given["seq_lens"].clone(), "query_start_loc": starts}, rows)


def run_again(runs: Sequence[Run]) -> list[Run]:
    """What replays are, where there are no graphs: each writes to the same place each time."""

    def replay(run: Run) -> Run:
        kept = run().clone()
        return lambda: kept.copy_(run())

    return [replay(run) for run in runs]


def capture_all(runs: Sequence[Run]) -> list[Run]:
    pool = torch.cuda.graph_pool_handle()
    return [captured(run, pool) for run in runs]


def graphs(drafter: Drafter, device: str, sizes: list[int]) -> DraftGraphs:
    capture = run_again if device == "cpu" else capture_all
    return DraftGraphs(drafter, DraftInputs(SHAPE, torch.device(device)), sizes, capture)


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=40)
@given(st.lists(st.integers(1, ROWS), min_size=1, max_size=8), st.integers(0, 2**20))
def test_drafts_and_keys_are_those_of_drafting_that_is_launched(device: str, rows: list[int], seed: int):
    launched, replayed = Drafter(device), Drafter(device)
    made = graphs(replayed, device, [1, 4, ROWS])
    for number, count in enumerate(rows):
        given_ = batch(count, seed + number, device)
        before = {name: each.clone() for name, each in given_.items()}
        found = made.draft(count, given_)
        assert torch.equal(found, directly(launched, given_))
        assert torch.equal(replayed.keys[PAGE:], launched.keys[PAGE:]), "rows that are nobody's have kept something"
        assert all(torch.equal(each, before[name]) for name, each in given_.items())


@pytest.mark.parametrize("device", DEVICES)
def test_drafts_stay_when_the_next_batch_is_drafted_for(device: str):
    made = graphs(Drafter(device), device, [4])
    first = made.draft(4, batch(4, 0, device))
    kept = first.clone()
    made.draft(3, batch(3, 1, device))
    assert torch.equal(first, kept)


def test_rows_that_are_nobody_s_stay_as_they_are_however_often_they_are_replayed():
    inputs = DraftInputs(SHAPE, torch.device("cpu"))
    assert set(inputs.of(ROWS)["slot_mapping"].tolist()) == {NO_SLOT}
    made = DraftGraphs(Drafter("cpu"), inputs, [ROWS], run_again)
    made.draft(ROWS, batch(ROWS, 0, "cpu"))
    for seed in range(3):
        made.draft(2, batch(2, seed, "cpu"))
    rest = {name: each[2 * len(each) // ROWS :] for name, each in inputs.of(ROWS).items() if name != "query_start_loc"}
    assert set(rest["slot_mapping"].tolist()) == {NO_SLOT}
    assert set(rest["seq_lens"].tolist()) == {TOKENS}
    assert not rest["block_table"].any()


def test_what_is_captured_is_kept():
    """A graph knows addresses, and holds no tensor that was there before it."""
    drafter = Drafter("cpu")
    keys = weakref.ref(drafter.keys)
    made = graphs(drafter, "cpu", [1])
    made._replays.clear()  # a graph has no reference to what made it
    del drafter
    gc.collect()
    assert keys() is not None


def test_each_size_is_captured_once_the_largest_first_after_it_has_run():
    ran: list[int] = []
    events: list[str] = []

    def drafting(given: Mapping[str, torch.Tensor], rows: int) -> torch.Tensor:
        ran.append(rows)
        events.append(f"run {rows}")
        return torch.zeros(rows, DRAFTS, dtype=torch.int64)

    def capture(runs: Sequence[Run]) -> Sequence[Run]:
        events.append(f"capture {len(runs)}")
        return runs

    made = DraftGraphs(drafting, DraftInputs(SHAPE, torch.device("cpu")), [1, 4, 2], capture)
    assert events == ["run 4", "run 2", "run 1", "capture 3"]
    assert made.sizes == [1, 2, 4]
    ran.clear()
    for rows in (1, 2, 3, 4):
        assert made.draft(rows, batch(rows, 0, "cpu")).shape == (rows, DRAFTS)
    assert ran == [1, 2, 4, 4]


@pytest.mark.parametrize(
    ("most", "sizes"),
    [
        (1, [1]),
        (3, [1, 2, 3]),
        (8, [1, 2, 4, 6, 8]),
        (33, [1, 2, 4, 6, 8, 12, 16, 24, 32, 33]),
        (256, [1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256]),
    ],
)
def test_batch_sizes_are_few_and_none_is_half_empty(most: int, sizes: list[int]):
    assert batch_sizes(most) == sizes


@pytest.mark.gpu
def test_what_waits_for_the_device_is_refused():
    def drafting(given: Mapping[str, torch.Tensor], rows: int) -> torch.Tensor:
        return torch.zeros(rows, int(given["seq_lens"].max()), device="cuda")

    with pytest.raises(RuntimeError, match="captur"):
        DraftGraphs(drafting, DraftInputs(SHAPE, torch.device("cuda")), [2], capture_all)
    torch.cuda.synchronize()
