"""A prompt's last chunk that is as long as a decode step of a hybrid: what vLLM's runner and builder make of it."""

import importlib
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from undone import applied, module_of

from vllm_async_spec.compat.backend_builders import mamba_builder
from vllm_async_spec.compat.builder_inputs import BuilderInputs
from vllm_async_spec.compat.cases import DRAFT_TOKENS

TOKENS = DRAFT_TOKENS + 1
NO_LORA: dict[int, object] = {}


@pytest.fixture(scope="module")
def stock(release: str) -> Any:
    return module_of(release, "prompt-ends").GPUModelRunner


@pytest.fixture(scope="module")
def mended(stock: Any) -> Iterator[Any]:
    with applied("prompt-ends"):
        yield importlib.import_module("vllm.v1.worker.gpu_model_runner").GPUModelRunner


def decodes(
    runner_class: Any,
    rows: Sequence[int],
    *,
    forced: bool | None = None,
    hybrid: bool = True,
    drafts: int = DRAFT_TOKENS,
    pipeline: int = 1,
) -> bool:
    """Whether the runner takes a step for one that decodes; `rows` has the drafts of each, and all have as many tokens.

    `forced` is vLLM's own answer in a dummy run. `pipeline`: stages, with sequence parallelism.
    """
    asked: list[bool] = []

    def dispatch(**given: Any) -> Any:
        asked.append(given["uniform_decode"])
        return SimpleNamespace(name="NONE"), SimpleNamespace(num_tokens=given["num_tokens"])

    parallel = SimpleNamespace(data_parallel_size=1, tensor_parallel_size=1, pipeline_parallel_size=pipeline)
    names = {"_pad_for_sequence_parallelism": lambda self, tokens: tokens}
    runner: Any = object.__new__(type("Runner", (runner_class,), names))
    runner.uniform_decode_query_len, runner.num_spec_tokens = drafts + 1, drafts
    runner.input_batch = SimpleNamespace(lora_id_to_lora_request=NO_LORA)
    runner.model_config = SimpleNamespace(is_hybrid=hybrid, is_encoder_decoder=False)
    runner.cudagraph_dispatcher = SimpleNamespace(dispatch=dispatch)
    runner.parallel_config, runner.vllm_config = (
        parallel,
        SimpleNamespace(parallel_config=parallel, observability_config=SimpleNamespace(cudagraph_metrics=False)),
    )
    runner.compilation_config = SimpleNamespace(
        pass_config=SimpleNamespace(enable_sp=pipeline > 1), cudagraph_mode=None
    )
    scheduled = {str(row): [-1] * count for row, count in enumerate(rows) if count}
    note_drafts(runner, SimpleNamespace(scheduled_spec_decode_tokens=scheduled))
    forcing = {} if forced is None else {"force_uniform_decode": forced}
    runner._determine_batch_execution_and_padding(
        num_tokens=len(rows) * (drafts + 1),
        num_reqs=len(rows),
        num_scheduled_tokens_np=None,
        max_num_scheduled_tokens=drafts + 1,
        use_cascade_attn=False,
        **forcing,
    )
    (found,) = asked
    return found


def note_drafts(runner: Any, scheduled: Any) -> None:
    """Begin a step, of which the bare runner can't do more than the patch's part."""
    with pytest.raises(AttributeError):
        runner._update_states(scheduled)


FULL = DRAFT_TOKENS
DECODING, ENDING, FIRST = [FULL] * 3, [FULL, FULL, 0], [0]
"""Steps: all rows with drafts; a prompt's end among them; a prompt alone that is no longer."""


@pytest.mark.parametrize("rows", [DECODING, ENDING, FIRST])
def test_stock_takes_each_of_these_steps_for_decoding(stock: Any, rows: list[int]):
    assert decodes(stock, rows)


def test_only_requests_with_drafts_decode(mended: Any):
    assert decodes(mended, DECODING)
    assert not decodes(mended, ENDING)
    assert not decodes(mended, FIRST)


def test_all_else_is_vllms(mended: Any):
    assert decodes(mended, ENDING, hybrid=False), "attention has no tensors that an older step has left"
    assert decodes(mended, ENDING, forced=True), "a dummy run"
    assert not decodes(mended, DECODING, forced=False)
    assert decodes(mended, [0, 0], drafts=0), "without speculative decoding"
    assert decodes(mended, ENDING, pipeline=2), "the worker asks before the step, for the same answer"


def test_the_builder_leaves_an_older_step_where_graphs_read(stock: Any, release: str, make_common_metadata: Any):
    """So a graph that is replayed for a batch with a prompt's end reads states of other requests."""
    module: Any = importlib.import_module("vllm.v1.attention.backends.gdn_attn")
    builder = mamba_builder(module.GDNAttentionMetadataBuilder, BuilderInputs(torch.device("cpu")))
    builder.use_full_cuda_graph = True

    def build(drafts: list[int], first: int) -> Any:
        blocks = torch.arange(first, first + 3 * TOKENS, dtype=torch.int32).view(3, TOKENS)
        prefilling = torch.tensor([count < 0 for count in drafts])
        batch = make_common_metadata([TOKENS] * 3, [40] * 3, host=True, block_table_tensor=blocks)
        if hasattr(batch, "is_prefilling"):
            batch.is_prefilling = prefilling
        accepted = torch.full((3,), first, dtype=torch.int32)
        return builder.build(0, batch, accepted, torch.tensor(drafts, dtype=torch.int32))

    def read_by_graphs() -> list[int]:
        found: list[int] = builder.spec_state_indices_tensor[:3, 0].tolist()
        return found

    build([FULL] * 3, first=1)
    older = read_by_graphs()
    assert older == [1, 1 + TOKENS, 1 + 2 * TOKENS]
    assert build([FULL, FULL, -1], first=50).num_prefills == 1
    assert read_by_graphs() == older
    build([FULL] * 3, first=50)
    assert read_by_graphs() == [50, 50 + TOKENS, 50 + 2 * TOKENS]
