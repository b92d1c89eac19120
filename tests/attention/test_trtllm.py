"""The adapter for trtllm-gen and XQA, against a second copy of their contract."""

import inspect
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest
import torch
import trtllm_contract
from batches import Batch, ordered_batches
from hypothesis import given
from hypothesis import strategies as st
from trtllm_shapes import OLD, PAGE, SM90, SM100

from vllm_async_spec import CommonAttentionMetadata, reset_sync_report, sync_policy, sync_report
from vllm_async_spec.attention import (
    ReferenceAdapter,
    TrtllmAdapter,
    TrtllmArguments,
    bmm_scales,
    causal_draft_masks,
    paged_attention,
    takes_ragged,
)

HEADS, KV_HEADS, HEAD_SIZE = 4, 2, 16
SCALE = HEAD_SIZE**-0.5
# The adapter looks at neither heads nor dtypes, so the shapes above also stand for the small tensors below.
KINDS = {"trtllm-gen": SM100, "xqa": SM90, "xqa, no ragged batches": replace(SM90, features=OLD)}


@dataclass
class Case:
    """A batch, its caches with NaN wherever no token of it is, and the same without NaN for the oracle."""

    metadata: CommonAttentionMetadata
    query: torch.Tensor
    poisoned: tuple[torch.Tensor, torch.Tensor]
    clean: tuple[torch.Tensor, torch.Tensor]

    def oracle(self, window: int | None = None) -> torch.Tensor:
        arguments = ReferenceAdapter().arguments(self.metadata)
        return paged_attention(self.query, *self.clean, arguments, sliding_window=window)


def make_case(batch: Batch, *, slack: int = 0, bounded: bool = True) -> Case:
    generator = torch.Generator().manual_seed(sum(batch.seq_lens))
    metadata = batch.metadata(slack=slack, bounded=bounded)
    width = max(1, -(-metadata.max_seq_len // PAGE))
    pages = torch.randperm(metadata.num_reqs * width, generator=generator, dtype=torch.int32).reshape(-1, width)
    shape = (max(1, pages.numel()) * PAGE, KV_HEADS, HEAD_SIZE)
    caches = []
    for _ in range(2):
        cache = torch.full(shape, torch.nan)
        for row, length in enumerate(batch.seq_lens):
            at = torch.arange(length)
            cache[pages[row, at // PAGE] * PAGE + at % PAGE] = torch.randn(length, *shape[1:], generator=generator)
        caches.append(cache.unflatten(0, (-1, PAGE)))
    query = torch.randn(metadata.num_actual_tokens, HEADS, HEAD_SIZE, generator=generator)
    keys, values = caches
    clean = keys.nan_to_num(), values.nan_to_num()
    return Case(metadata.replace(block_table_tensor=pages), query, (keys, values), clean)


def run(arguments: TrtllmArguments, case: Case, *, window: int | None = None, old: bool = False) -> torch.Tensor:
    """What the functions write, given these arguments, and NaN where they write nothing; planned parts by torch."""
    out = torch.full_like(case.query, torch.nan)
    layer = {"workspace_buffer": torch.zeros(1)} | bmm_scales(SCALE)
    done = 0
    decode = arguments.decode
    if decode is not None:
        assert decode.tokens.start == 0
        done = decode.tokens.stop
        call = {"query": case.query[decode.tokens], "kv_cache": in_layout(case.poisoned, decode.kv_layout)} | layer
        outs = []
        if decode.kernel == "trtllm-gen" or decode.cum_seq_lens_q is None:
            function = trtllm_contract.trtllm_batch_decode_with_kv_cache
            outs.append(function(**call, **decode.trtllm_batch_decode()))
        if decode.kernel == "xqa":
            name = "xqa_batch_decode_with_kv_cache" + ("_before_0_6_16" if old else "")
            outs.append(getattr(trtllm_contract, name)(**call, **decode.xqa_batch_decode()))
        out[decode.tokens] = outs[-1]
        assert torch.equal(outs[0].nan_to_num(), outs[-1].nan_to_num())
    context = arguments.context
    if context is not None:
        assert context.tokens.start == done
        call = {"query": case.query[context.tokens], "kv_cache": in_layout(case.poisoned, context.kv_layout)} | layer
        function = trtllm_contract.trtllm_batch_context_with_kv_cache
        out[context.tokens] = function(**call, **context.trtllm_batch_context())
    if arguments.planned is not None:
        rest = slice(done, done + arguments.planned.num_actual_tokens)
        planned = ReferenceAdapter().arguments(arguments.planned)
        out[rest] = paged_attention(case.query[rest], *case.clean, planned, sliding_window=window)
    return out


def in_layout(caches: tuple[torch.Tensor, torch.Tensor], layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    keys, values = caches
    return caches if layout == "NHD" else (keys.transpose(1, 2), values.transpose(1, 2))


def live(batch: Batch) -> int:
    return batch.starts[-1]


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_the_arguments_mean_what_the_oracle_computes(kind: str, data: st.DataObject):
    query_tokens = data.draw(st.sampled_from([1, 2, 4, 33]), label="query_tokens")
    window = data.draw(st.sampled_from([None, 1, 7, 100]), label="window")
    layout = data.draw(st.sampled_from(["HND", "NHD"]), label="kv_layout")
    shape = replace(KINDS[kind], query_tokens=query_tokens, kv_layout=layout)
    if shape.ragged or query_tokens == 1:
        shape = replace(shape, sliding_window=window)
    batch = data.draw(ordered_batches(query_tokens=query_tokens, page=PAGE))
    case = make_case(batch, slack=data.draw(st.integers(0, 40), label="slack"), bounded=data.draw(st.booleans()))
    reset_sync_report()
    with sync_policy("error"):
        arguments = TrtllmAdapter(shape).arguments(case.metadata)
    assert sync_report().count == 0
    got = run(arguments, case, window=shape.sliding_window, old=not shape.ragged)
    close(got[: live(batch)], case.oracle(shape.sliding_window)[: live(batch)])


BATCHES = {
    "decode": Batch((1, 1, 1), (33, 1, 48)),
    "drafts": Batch((4, 4, 4), (33, 4, 50)),
    "fewer drafts": Batch((3, 3), (33, 50)),
    "ragged": Batch((4, 1, 2), (33, 4, 50)),
    "ragged, one without": Batch((4, 0, 2), (33, 0, 50)),
    "mixed": Batch((1, 1, 9, 12), (60, 20, 9, 31)),
    "drafts and prefill": Batch((4, 4, 9), (60, 20, 31)),
    "ragged and prefill": Batch((4, 2, 9), (60, 20, 31)),
    "a short request behind a prefill": Batch((4, 9, 2), (60, 31, 20)),
    "empty rows before a prefill": Batch((4, 0, 0, 8), (20, 0, 0, 31)),
    "prefill": Batch((17, 5), (17, 5)),
    "prefill and padding": Batch((4, 9, 0, 0), (20, 31, 0, 0), token_padding=3),
    "page boundary": Batch((4, 4, 4), (15, 16, 17)),
    "padding rows": Batch((4, 4, 0, 0), (21, 9, 0, 0), token_padding=3),
    "padded for a graph": Batch((4, 4, 0, 0), (21, 9, 0, 0), token_padding=8),
    "padding alone": Batch((0, 0), (0, 0), token_padding=2),
    "long": Batch((4, 4), (5000, 40)),
}


@dataclass(frozen=True)
class Split:
    """What the adapter makes of a batch: rows and width of its decodes, whether ragged, and rows of its prefills."""

    decodes: int
    width: int = 0
    ragged: bool = False
    prefills: int = 0


SPLITS = {
    "decode": Split(3, 1),
    "drafts": Split(3, 4),
    "fewer drafts": Split(2, 3),
    "ragged": Split(3, 4, ragged=True),
    "ragged, one without": Split(3, 4, ragged=True),
    "mixed": Split(2, 1, prefills=2),
    "drafts and prefill": Split(2, 4, prefills=1),
    "ragged and prefill": Split(2, 4, ragged=True, prefills=1),
    "a short request behind a prefill": Split(1, 4, prefills=2),
    "empty rows before a prefill": Split(1, 4, prefills=1),
    "prefill": Split(0, prefills=2),
    "prefill and padding": Split(1, 4, prefills=1),
    "page boundary": Split(3, 4),
    "padding rows": Split(2, 4),
    "padded for a graph": Split(4, 4),
    "padding alone": Split(0),
    "long": Split(2, 4),
}
OF_KIND = {
    ("fewer drafts", "xqa"): Split(2, 4, ragged=True),
    ("ragged", "xqa, no ragged batches"): Split(1, 4, prefills=2),
    ("ragged, one without", "xqa, no ragged batches"): Split(1, 4, prefills=2),
    ("ragged and prefill", "xqa, no ragged batches"): Split(1, 4, prefills=2),
}
"""Where a kind has another split."""


@pytest.mark.parametrize("name", BATCHES)
def test_decodes_are_first_and_of_the_width_that_the_kernel_has(name: str):
    for kind, shape in KINDS.items():
        case = make_case(BATCHES[name])
        arguments = TrtllmAdapter(shape).arguments(case.metadata)
        decode, context, planned = arguments.decode, arguments.context, arguments.planned
        assert (context is None) or (shape.kernel == "trtllm-gen")
        assert (planned is None) or (shape.kernel == "xqa")
        prefills = context.batch_size if context else planned.num_reqs if planned else 0
        got = Split(0, prefills=prefills)
        if decode is not None:
            ragged = decode.cum_seq_lens_q is not None
            got = Split(decode.seq_lens.shape[0], decode.max_q_len, ragged, prefills)
        assert got == OF_KIND.get((name, kind), SPLITS[name])
        close(run(arguments, case)[: live(BATCHES[name])], case.oracle()[: live(BATCHES[name])])


def test_single_tokens_around_an_empty_row_are_ragged_and_two_wide():
    """XQA's ragged form begins at a width of 2, also where no drafts are configured."""
    case = make_case(Batch((1, 0, 1), (20, 0, 31)))
    arguments = TrtllmAdapter(replace(SM90, query_tokens=1)).arguments(case.metadata)
    assert arguments.decode is not None
    assert (arguments.decode.max_q_len, arguments.decode.cum_seq_lens_q is not None) == (2, True)
    close(run(arguments, case), case.oracle())


def tensors(arguments: TrtllmArguments) -> dict[str, torch.Tensor]:
    found = {}
    for part in (arguments.decode, arguments.context):
        for each in fields(part) if part is not None else ():
            value = getattr(part, each.name)
            if isinstance(value, torch.Tensor):
                found[f"{type(part).__name__}.{each.name}"] = value
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", BATCHES)
def test_no_argument_is_a_tensor_of_the_host(name: str, kind: str):
    metadata = make_case(BATCHES[name], slack=3).metadata
    bound = metadata.seq_lens_cpu_upper_bound
    assert bound is not None
    hosts = {each.untyped_storage().data_ptr() for each in (metadata.query_start_loc_cpu, bound)}
    for what, tensor in tensors(TrtllmAdapter(KINDS[kind]).arguments(metadata)).items():
        assert tensor.untyped_storage().data_ptr() not in hosts, what


def test_a_ragged_batch_is_refused_where_xqa_is_reached_through_the_uniform_function():
    decode = TrtllmAdapter(SM90).arguments(make_case(BATCHES["ragged"]).metadata).decode
    assert decode is not None
    with pytest.raises(ValueError, match=r"the batch is ragged; .* use the arguments of xqa_batch_decode\(\)"):
        decode.trtllm_batch_decode()
    decode = TrtllmAdapter(SM100).arguments(make_case(BATCHES["ragged"]).metadata).decode
    assert decode is not None
    with pytest.raises(ValueError, match=r"the kernel is trtllm-gen; use the arguments of trtllm_batch_decode\(\)"):
        decode.xqa_batch_decode()


def test_a_batch_that_is_not_causal_is_refused():
    metadata = make_case(BATCHES["drafts"]).metadata.replace(causal=False)
    with pytest.raises(ValueError, match=r"the batch is not causal; .* use FLASH_ATTN"):
        TrtllmAdapter(SM100).arguments(metadata)


@pytest.mark.parametrize("name", ["block_table_tensor", "seq_lens"])
def test_a_tensor_with_gaps_is_refused(name: str):
    metadata = make_case(BATCHES["long"]).metadata
    whole = getattr(metadata, name)
    gaps = torch.stack([whole, whole], dim=-1)[..., 0]
    with pytest.raises(ValueError, match=rf"{name} of shape .* has strides .* so give {name}.contiguous\(\)"):
        TrtllmAdapter(SM100).arguments(metadata.replace(**{name: gaps}))


@pytest.mark.parametrize("width", [1, 2, 16, 31, 32, 33, 64, 70])
def test_masks_are_those_that_the_kernel_reads(width: int):
    """Bit j % 16 of word j // 16, and rows of whole 32 bits: `applyMaskFromInput` in csrc/xqa/mha.cu."""
    masks = causal_draft_masks(torch.arange(width), width)
    assert masks.dtype == torch.uint16
    assert masks.shape == (width, -(-width // 32) * 2)
    for row, words in enumerate(masks.tolist()):
        bits = [words[j // 16] >> j % 16 & 1 for j in range(16 * len(words))]
        assert bits == [int(j <= row) for j in range(len(bits))]


def test_a_uniform_mask_keeps_its_address():
    """What a CUDA graph has captured must not be freed or filled with something else."""
    adapter = TrtllmAdapter(SM90)

    def mask(rows: int) -> torch.Tensor:
        decode = adapter.arguments(make_case(Batch((4,) * rows, (20,) * rows)).metadata).decode
        assert decode is not None
        assert decode.mask is not None
        return decode.mask

    first = mask(3)
    large = mask(9)
    again = mask(3)
    assert first.data_ptr() == again.data_ptr() == mask(4).data_ptr() != large.data_ptr()
    assert torch.equal(first, large[:3])


def test_scales_stay_where_they_are():
    assert bmm_scales(0.5) == {"bmm1_scale": 0.5, "bmm2_scale": 1.0}
    assert bmm_scales(0.5, query=2.0, key=3.0, value=4.0) == {"bmm1_scale": 3.0, "bmm2_scale": 4.0}
    on_device = torch.tensor([3.0], device="meta")  # reading it would raise
    scales = bmm_scales(0.5, query=2.0, key=on_device, value=on_device)
    for scale in scales.values():
        assert isinstance(scale, torch.Tensor)
        assert scale.device.type == "meta"
        assert (scale.dtype, scale.numel()) == (torch.float32, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"key": 1}, "key is 1; it must be a float"),
        (
            {"value": torch.ones(2)},
            r"value is torch.float32 of shape \(2,\); it must be a float, or a float32 tensor of one",
        ),
        ({"query": torch.ones(1, dtype=torch.bfloat16)}, r"query is torch.bfloat16 of shape \(1,\)"),
    ],
)
def test_a_scale_that_no_kernel_reads_is_refused(options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        bmm_scales(0.5, **options)


@pytest.mark.parametrize("kind", ["trtllm-gen", "xqa"])
def test_fp8_scales_mean_what_the_oracle_computes_with_the_stored_values(kind: str):
    case = make_case(BATCHES["drafts"])
    decode = TrtllmAdapter(KINDS[kind]).arguments(case.metadata).decode
    assert decode is not None
    query, key, value = 0.5, torch.tensor([0.25]), torch.tensor(3.0)
    got = trtllm_contract.trtllm_batch_decode_with_kv_cache(
        case.query,
        in_layout(case.poisoned, decode.kv_layout),
        torch.zeros(1),
        **decode.trtllm_batch_decode(),
        **bmm_scales(SCALE, query=query, key=key, value=value),
    )
    keys, values = case.clean
    scaled = replace(case, query=case.query * query, clean=(keys * key, values * value))
    close(got, scaled.oracle())


def test_it_is_named_as_in_vllm():
    assert TrtllmAdapter(SM100).name == "FLASHINFER_TRTLLM"


def test_the_contract_has_the_parameters_of_the_installed_flashinfer():
    pytest.importorskip("flashinfer", reason="flashinfer-python is not installed")
    from flashinfer import decode, prefill

    xqa = "xqa_batch_decode_with_kv_cache"
    pairs = [
        (decode, "trtllm_batch_decode_with_kv_cache", "trtllm_batch_decode_with_kv_cache"),
        (decode, xqa, xqa if takes_ragged(getattr(decode, xqa)) else f"{xqa}_before_0_6_16"),
        (prefill, "trtllm_batch_context_with_kv_cache", "trtllm_batch_context_with_kv_cache"),
    ]
    for module, name, stand_in in pairs:
        theirs = inspect.signature(getattr(module, name)).parameters
        for parameter, ours in inspect.signature(getattr(trtllm_contract, stand_in)).parameters.items():
            assert parameter in theirs, (name, parameter)
            assert theirs[parameter].default == ours.default, (name, parameter)
