"""Metadata of linear attention that is kept from step to step, compared with what vLLM builds anew in each."""

import dataclasses
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from undone import applied, module_of

from vllm_async_spec.compat.backend_builders import mamba_builder
from vllm_async_spec.compat.builder_inputs import BuilderInputs
from vllm_async_spec.compat.cases import DRAFT_TOKENS
from vllm_async_spec.vllm_plugin.patches.linear_attention import KeptStep

GDN = "vllm.v1.attention.backends.gdn_attn"
PREFILL, PLAIN, PADDING = -1, -2, -3
"""Kinds of rows beside those with a number of drafts: a prompt's chunk, a decode without drafts, an empty row."""
WIDTH = 12
"""Blocks of a request: those of its whole length, where states are kept for prefixes too."""
Rows = list[int]
MakeBatch = Callable[..., Any]


@pytest.fixture(scope="module")
def module(release: str) -> Any:
    return module_of(release, "linear-attention", GDN)


@pytest.fixture(scope="module")
def stock(module: Any) -> Any:
    return module.GDNAttentionMetadataBuilder.build


@pytest.fixture(scope="module")
def subject(module: Any, stock: Any) -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
        with applied("linear-attention"):
            yield module.GDNAttentionMetadataBuilder


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each step with a kept one, whether the kept one was for it."""
    found: list[bool] = []
    inner = KeptStep.is_of

    def noted(self: KeptStep, *args: Any) -> bool:
        found.append(inner(self, *args))
        return found[-1]

    monkeypatch.setattr(KeptStep, "is_of", noted)
    return found


def builders(subject: Any, graphs: bool, mode: str = "none") -> tuple[Any, Any]:
    made = [mamba_builder(subject, BuilderInputs(torch.device("cpu"))) for _ in range(2)]
    for builder in made:
        builder.use_full_cuda_graph = graphs
        builder.vllm_config.cache_config.mamba_cache_mode = mode
    return made[0], made[1]


def batches(seed: int) -> Iterator[Rows]:
    """Batches that go on for some steps each, and change in all ways."""
    source = random.Random(seed)
    full = DRAFT_TOKENS
    for _ in range(8):
        requests = source.randint(1, 6)
        rows = [full] * requests
        yield from [rows] * source.randint(1, 4)
        yield from [rows + [PADDING] * source.randint(1, 3)] * source.randint(1, 3)
        yield [*rows[:-1], source.choice([0, 1, full - 1, PREFILL, PLAIN])]
        yield [*rows, PREFILL]
        yield from [[source.randint(0, full) for _ in rows]] * source.randint(1, 2)


def step(make: MakeBatch, rows: Rows, source: random.Random) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """A batch of these rows with states in random places, its accepted counts, and its drafts."""
    tokens = {PREFILL: source.randint(2, 9), PLAIN: 1, PADDING: 0}
    query = [tokens.get(row, row + 1) for row in rows]
    lengths = [count and count + source.randint(0, 40) for count in query]
    blocks = torch.tensor([source.sample(range(1, 99), WIDTH) for _ in rows], dtype=torch.int32)
    prefilling = torch.tensor([row == PREFILL for row in rows])
    batch = make(query, lengths, block_table_tensor=blocks, is_prefilling=prefilling)
    accepted = torch.tensor([source.randint(1, DRAFT_TOKENS + 1) for _ in rows], dtype=torch.int32)
    return batch, accepted, torch.tensor([max(row, -1) for row in rows], dtype=torch.int32)


def made_by(builder: Any, build: Any, given: tuple[Any, torch.Tensor, torch.Tensor]) -> Any:
    batch, accepted, drafts = given
    return build(
        builder,
        common_prefix_len=0,
        common_attn_metadata=batch,
        num_accepted_tokens=accepted,
        num_decode_draft_tokens_cpu=drafts,
    )


def places(builder: Any, made: Any) -> dict[str, bool]:
    """For each tensor of the metadata whether it is the builder's own of that name, which CUDA graphs read."""
    return {
        name: value.data_ptr() == getattr(builder, name).data_ptr()
        for name, value in vars(made).items()
        if isinstance(value, torch.Tensor) and isinstance(getattr(builder, name, None), torch.Tensor)
    }


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return bool(one == other)


def different(left: Any, right: Any) -> list[str]:
    """The fields in which two metadata differ."""
    names = [field.name for field in dataclasses.fields(left)]
    return [name for name in names if not same(getattr(left, name), getattr(right, name))]


def wrong(subject: Any, stock: Any, make: MakeBatch, *, seed: int, graphs: bool, mode: str = "none") -> list[str]:
    """The fields of the first step that differ from stock's, or lie elsewhere."""
    source = random.Random(seed)
    kept, anew = builders(subject, graphs, mode)
    for rows in batches(seed):
        given = step(make, rows, source)
        found, expected = made_by(kept, subject.build, given), made_by(anew, stock, given)
        if differences := different(found, expected):
            return differences
        if (at := places(kept, found)) != places(anew, expected):
            return [f"place of {name}" for name in at]
    return []


@pytest.fixture
def make(make_common_metadata: MakeBatch, module: Any) -> MakeBatch:
    known = {field.name for field in dataclasses.fields(module.CommonAttentionMetadata)}

    def made(query: list[int], lengths: list[int], **fields: Any) -> Any:
        return make_common_metadata(query, lengths, host=True, **{k: v for k, v in fields.items() if k in known})

    return made


@pytest.mark.parametrize("mode", ["none", "align"])
@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
@pytest.mark.parametrize("seed", range(4))
def test_every_step_has_stocks_metadata(
    subject: Any, stock: Any, make: MakeBatch, taken: list[bool], seed: int, graphs: bool, mode: str
):
    assert wrong(subject, stock, make, seed=seed, graphs=graphs, mode=mode) == []
    assert sum(taken) > 10
    assert taken.count(False) > 10


def of_another_step(self: KeptStep, builder: Any, batch: Any, blocks: torch.Tensor, accepted: torch.Tensor) -> Any:
    return self.metadata


def always(self: KeptStep, batch: Any, drafts: Any) -> bool:
    return drafts is not None and len(drafts) == len(self.drafts)


@pytest.mark.parametrize(("name", "fault"), [("of_next", of_another_step), ("is_of", always)])
@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
def test_a_stale_step_is_found(
    subject: Any, stock: Any, make: MakeBatch, monkeypatch: pytest.MonkeyPatch, name: str, fault: Any, graphs: bool
):
    monkeypatch.setattr(KeptStep, name, fault)
    assert any(wrong(subject, stock, make, seed=seed, graphs=graphs) for seed in range(3))


def test_what_graphs_do_not_read_is_found(subject: Any, stock: Any, make: MakeBatch, monkeypatch: pytest.MonkeyPatch):
    inner = KeptStep.of

    def unstaged(*args: Any) -> KeptStep | None:
        made = inner(*args)
        return made and dataclasses.replace(made, staged=False)

    monkeypatch.setattr(KeptStep, "of", unstaged)
    assert wrong(subject, stock, make, seed=0, graphs=True)


def test_a_subclass_builds_every_step_anew(subject: Any, make: MakeBatch, taken: list[bool]):
    builder = mamba_builder(type("Own", (subject,), {}), BuilderInputs(torch.device("cpu")))
    for _ in range(3):
        made_by(builder, subject.build, step(make, [DRAFT_TOKENS] * 2, random.Random(0)))
    assert taken == []


def test_the_v2_runner_builds_every_step_anew(
    subject: Any, make: MakeBatch, taken: list[bool], monkeypatch: pytest.MonkeyPatch
):
    builder = builders(subject, graphs=True)[0]
    monkeypatch.setattr("vllm_async_spec.vllm_plugin.patches.linear_attention.runner_of", lambda config: "V2")
    for _ in range(3):
        made_by(builder, subject.build, step(make, [DRAFT_TOKENS] * 2, random.Random(0)))
    assert taken == []
