"""Bookkeeping of drafts on the device."""

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from vllm_async_spec import reset_sync_report, sync_policy, sync_report
from vllm_async_spec.kernels import PagedGroup, StepInputs
from vllm_async_spec.spec_decode import DeviceProgress, PolledEvent, RotatingBuffer
from vllm_async_spec.streams import refuse_waits

ROWS, PAGE, LONGEST, DRAFTS = 7, 16, 512, 3


class Batches:
    """A runner's batches, seen twice: with what the host may assume of them, and with what is true."""

    def __init__(self, seed: int, device: str) -> None:
        self.choose = random.Random(seed)
        self.device = torch.device(device)
        self.progress = DeviceProgress(ROWS, self.device)
        self.true: dict[str, int] = {}
        self.prompt: dict[str, int] = {}
        self.last: dict[str, tuple[int, int]] = {}  # request: its row and drafts in the last step
        self.assumed: dict[str, int] = {}
        self.names = 0
        starts, lengths = (torch.zeros(ROWS + 1, dtype=torch.int32, device=device) for _ in range(2))
        positions, slots = (torch.zeros(LONGEST, dtype=torch.int64, device=device) for _ in range(2))
        tokens, verified = (torch.zeros(LONGEST, dtype=torch.int32, device=device) for _ in range(2))
        table = torch.arange(ROWS * 64, dtype=torch.int32, device=device).view(ROWS, 64)
        paged = [PagedGroup(table, PAGE, slots)]
        self.sent = StepInputs(starts, tokens, verified, positions, lengths, None, paged)
        self.sampled = torch.zeros(ROWS, 1, dtype=torch.int32, device=device)
        self.drafted = torch.zeros(ROWS, DRAFTS, dtype=torch.int64, device=device)
        self.numbers = iter(range(1, 10**9))  # no two tokens of a run are equal
        self.tokens_of: dict[str, list[int]] = {}  # what the last step has sampled and drafted for a request
        self.wanted: list[tuple[list[int], ...]] = []
        self.got: list[tuple[torch.Tensor, ...]] = []

    def step(self) -> None:
        choose = self.choose
        names = [name for name in self.true if choose.random() < 0.85]
        self.last = {name: at for name, at in self.last.items() if name in names}
        while len(names) < ROWS and choose.random() < 0.3:
            names.append(f"r{self.names}")
            self.names += 1
            self.prompt[names[-1]] = choose.randrange(1, 40)
            self.true[names[-1]] = 0
        if choose.random() < 0.3:
            choose.shuffle(names)
        names = names[:ROWS] or ["only"]
        for name in names:
            self.true.setdefault(name, 0)
            self.prompt.setdefault(name, 5)
        drafts, tokens, computed = [], [], []
        for name in names:
            decoding = self.true[name] >= self.prompt[name]
            drafts.append(choose.randrange(DRAFTS + 1) if decoding else 0)
            tokens.append(1 + drafts[-1] if decoding else choose.randrange(1, self.prompt[name] - self.true[name] + 1))
            computed.append(self.assumed[name] if name in self.last else self.true[name])
        starts = [sum(tokens[:row]) for row in range(len(names) + 1)]
        host_tokens = [next(self.numbers) for _ in range(starts[-1])]
        self._send(names, starts, tokens, computed, drafts, host_tokens)
        exact = [self.true[name] for name in names]
        input_ids, verified = list(host_tokens), []
        for row, name in enumerate(names):
            if name in self.last:
                input_ids[starts[row + 1] - drafts[row] - 1 : starts[row + 1]] = self.tokens_of[name][: drafts[row] + 1]
            verified += input_ids[starts[row + 1] - drafts[row] : starts[row + 1]]
        self.wanted.append(
            (
                [at + count for at, count in zip(exact, tokens, strict=True)],
                [at + token for at, count in zip(exact, tokens, strict=True) for token in range(count)],
                input_ids,
                verified,
            )
        )
        ends = {"seq_lens": len(names), "positions": starts[-1], "input_ids": starts[-1], "verified": sum(drafts)}
        self.got.append(tuple(getattr(self.sent, name)[:end].clone() for name, end in ends.items()))
        counts = [choose.randrange(1, count + 2) for count in drafts]
        self.progress.sampled(self._on_device(counts))
        self.tokens_of = {name: [next(self.numbers) for _ in range(1 + DRAFTS)] for name in names}
        left = self._on_device([token for name in names for token in self.tokens_of[name]]).view(-1, 1 + DRAFTS)
        self.sampled, self.drafted = left[:, :1], left[:, 1:].long()
        self.last = {name: (row, drafts[row]) for row, name in enumerate(names)}
        for row, name in enumerate(names):
            self.assumed[name] = exact[row] + tokens[row]
            self.true[name] = exact[row] + (counts[row] if drafts[row] else tokens[row])

    def _send(
        self,
        names: list[str],
        starts: list[int],
        tokens: list[int],
        computed: list[int],
        drafts: list[int],
        host_tokens: list[int],
    ) -> None:
        """What the runner does of itself, and then the correction."""
        lengths = [at + count for at, count in zip(computed, tokens, strict=True)]
        positions = [at + token for at, count in zip(computed, tokens, strict=True) for token in range(count)]
        self.sent.query_start_loc[: len(starts)] = self._on_device(starts)
        self.sent.seq_lens[: len(lengths)] = self._on_device(lengths)
        self.sent.positions[: len(positions)] = self._on_device(positions)
        self.sent.input_ids[: len(positions)] = self._on_device(host_tokens)
        self.correct(names, computed, drafts)

    def correct(self, names: list[str], computed: list[int], drafts: list[int]) -> None:
        self.progress.correct(
            names,
            {name: row for name, (row, _) in self.last.items()},
            np.array(computed, dtype=np.int32),
            np.array(drafts, dtype=np.int32) if any(drafts) else None,
            self.sampled,
            self.drafted,
            self.sent,
        )

    def _on_device(self, values: list[int]) -> torch.Tensor:
        host = torch.tensor(values, dtype=torch.int32)
        return host.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else host

    def check(self) -> None:
        for step, (wanted, got) in enumerate(zip(self.wanted, self.got, strict=True)):
            for name, values, tensor in zip(("lengths", "positions", "tokens", "drafts"), wanted, got, strict=True):
                assert tensor.tolist() == values, (step, name)


@pytest.mark.parametrize("seed", range(30))
def test_progress_is_exact_over_many_steps(seed: int):
    batches = Batches(seed, "cpu")
    with sync_policy("error"):
        for _ in range(25):
            batches.step()
    batches.check()


def test_a_step_reads_the_carry_of_the_last_and_writes_another(monkeypatch: pytest.MonkeyPatch):
    """A program of the kernel may write a row's carry before another has read what was there."""
    steps: list[tuple[int, int]] = []
    monkeypatch.setattr(
        "vllm_async_spec.spec_decode.progress.correct_inputs",
        lambda last, rows, batch, next_carry, sent: steps.append((last.carry.data_ptr(), next_carry.data_ptr())),
    )
    batches = Batches(1, "cpu")
    for _ in range(3):
        batches.step()
    (first, second), *_ = steps
    assert first != second
    assert steps == [(first, second), (second, first), (first, second)]


def test_most_counts_are_those_of_the_last_step():
    batches = Batches(1, "cpu")
    assert not batches.progress.drafted
    batches.sent.query_start_loc[:4] = torch.tensor([0, 4, 5, 8])
    batches.correct(["a", "b", "c"], [9, 9, 9], [3, 0, 2])
    assert batches.progress.drafted
    assert batches.progress.most_counts(3) == [4, 1, 3]
    batches.sent.query_start_loc[:3] = torch.tensor([0, 1, 2])
    batches.correct(["a", "b"], [9, 9], [0, 0])
    assert batches.progress.most_counts(2) == [1, 1]


def test_what_is_fetched_is_where_the_rows_began():
    batches = Batches(3, "cpu")
    for _ in range(9):
        batches.step()
        rows = len(batches.last)
        batches.progress.fetch(rows)
        lengths, *_ = batches.wanted[-1]
        tokens = batches.sent.query_start_loc.diff()[:rows]
        assert batches.progress.fetched()[:rows] == (torch.tensor(lengths) - tokens).tolist()


def test_a_buffer_turns_to_other_memory_and_returns_after_its_depth():
    buffer: Any = SimpleNamespace(cpu=torch.zeros(3, dtype=torch.int32), np=None)
    turning = RotatingBuffer(buffer, torch.device("cpu"), depth=3)
    seen = []
    for step in range(4):
        buffer.np[:] = step
        assert buffer.cpu.tolist() == [step] * 3
        seen.append(buffer.cpu.data_ptr())
        turning.turn()
    assert len(set(seen[:3])) == 3
    assert seen[3] == seen[0]


def test_an_event_that_has_happened_is_not_waited_for_and_another_is_counted():
    calls: list[str] = []
    happened = [True]
    event = SimpleNamespace(
        query=lambda: happened[0], record=lambda: calls.append("record"), synchronize=lambda: calls.append("wait")
    )
    polled = PolledEvent(event, "prepared inputs")
    reset_sync_report()
    polled.record()
    polled.synchronize()
    assert (calls, sync_report().count) == (["record"], 0)
    happened[0] = False
    polled.synchronize()
    assert calls == ["record", "wait"]
    assert [(site.what, site.kind.value, site.count) for site in sync_report().sites] == [
        ("prepared inputs", "event", 1)
    ]


def sleep(choose: random.Random) -> None:
    torch.cuda._sleep(choose.randrange(1, 20_000_000))


@pytest.mark.gpu
@pytest.mark.parametrize("guarded", [True, False])
def test_staging_is_fenced(guarded: bool, monkeypatch: pytest.MonkeyPatch):
    """With one buffer and no fence the host overwrites what a late device has yet to copy, and that shows."""
    batches = Batches(11, "cuda")
    batches.step()  # compiles
    if not guarded:
        ring = batches.progress._staging
        one = ring.next()
        monkeypatch.setattr(ring, "next", lambda: one)
    choose = random.Random(5)
    for _ in range(30):
        sleep(choose)
        batches.step()
    torch.cuda.synchronize()
    if guarded:
        batches.check()
    else:
        with pytest.raises(AssertionError):
            batches.check()


@pytest.mark.gpu
@pytest.mark.parametrize("guarded", [True, False])
def test_a_turning_buffer_is_never_written_in_flight(guarded: bool):
    buffer: Any = SimpleNamespace(cpu=torch.zeros(64, dtype=torch.int32, pin_memory=True))
    buffer.np = buffer.cpu.numpy()
    turning = RotatingBuffer(buffer, torch.device("cuda")) if guarded else None
    choose, received = random.Random(1), []
    for step in range(20):
        sleep(choose)
        buffer.np[:] = step
        received.append(buffer.cpu.to("cuda", non_blocking=True))
        if turning is not None:
            turning.turn()
    right = [tensor.tolist() == [step] * 64 for step, tensor in enumerate(received)]
    assert all(right) is guarded


@pytest.mark.gpu
def test_correcting_a_step_waits_for_nothing_on_a_late_device():
    batches = Batches(2, "cuda")
    for _ in range(3):
        batches.step()
    names = list(batches.last)
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)
    late = torch.cuda.Event()
    late.record()
    computed = [batches.assumed[name] for name in names]
    refuse_waits(lambda: batches.correct(names, computed, [0] * len(names)))
    assert not late.query()
