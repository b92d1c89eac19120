"""The optimistic runner on a real vLLM release, as fixtures: without a model, and its steps on CPU tensors."""

import contextlib
import importlib
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from undone import applied, module_of

from vllm_async_spec import reset_sync_report

ROWS, TOKENS, DRAFTS = 8, 64, 3
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def upstream(release):
    return module_of(release, "optimistic-runner").GPUModelRunner


@pytest.fixture
def runner_class(upstream):
    reset_sync_report()
    with applied("optimistic-runner"):
        yield importlib.import_module("vllm.v1.worker.gpu_model_runner").GPUModelRunner


class Event:
    def __init__(self) -> None:
        self.waits = 0

    def synchronize(self) -> None:
        self.waits += 1

    def record(self) -> None:
        pass


def buffer(*shape: int, dtype: torch.dtype) -> Any:
    from vllm.v1.utils import CpuGpuBuffer

    return CpuGpuBuffer(*shape, dtype=dtype, device=CPU, pin_memory=False)


def make_input_batch() -> Any:
    table = SimpleNamespace(
        block_table=buffer(ROWS, 16, dtype=torch.int32), block_size=16, slot_mapping=buffer(TOKENS, dtype=torch.int64)
    )
    return SimpleNamespace(
        prev_sampled_token_ids=None,
        prev_req_id_to_index=None,
        req_ids=[],
        num_reqs=0,
        num_computed_tokens_cpu=np.zeros(ROWS, dtype=np.int32),
        num_prompt_tokens=np.zeros(ROWS, dtype=np.int32),
        num_tokens_no_spec=np.zeros(ROWS, dtype=np.int32),
        block_table=SimpleNamespace(block_tables=[table]),
        no_penalties=True,
        bad_words_token_ids={},
        sampling_metadata=SimpleNamespace(output_token_ids=[]),
        logitsprocs=SimpleNamespace(all=[]),
    )


def group(name: str = "FLASH_ATTN", spec: str = "FullAttentionSpec", builder: Any = None) -> Any:
    return SimpleNamespace(
        backend=SimpleNamespace(get_name=lambda: name),
        kv_cache_spec=type(spec, (), {})(),
        metadata_builders=[builder or made_by("vllm.v1.attention.backends.any")],
    )


def made_by(module: str, **attributes: Any) -> Any:
    return type("Builder", (), {"__module__": module, **attributes})()


def settings() -> dict[str, Any]:
    return {
        "parallel_config": SimpleNamespace(
            pipeline_parallel_size=1, prefill_context_parallel_size=1, use_ubatching=False
        ),
        "dcp_world_size": 1,
        "model_config": SimpleNamespace(is_hybrid=False),
        "speculative_config": SimpleNamespace(use_ngram_gpu=lambda: False),
        "is_multimodal_pruning_enabled": False,
        "enable_prompt_embeds": False,
        "attn_groups": [[group()]],
        "drafter": SimpleNamespace(backup_next_token_ids=buffer(ROWS, dtype=torch.int32)),
    }


@pytest.fixture
def runner(runner_class):
    made = object.__new__(runner_class)
    vars(made).update(
        settings(),
        device=CPU,
        max_num_reqs=ROWS,
        max_num_tokens=TOKENS,
        num_spec_tokens=DRAFTS,
        _draft_token_ids=None,
        cascade_attn_enabled=True,
        supports_mm_inputs=False,
        uses_mrope=False,
        uses_xdrope_dim=0,
        requests={},
        input_batch=make_input_batch(),
        input_ids=buffer(TOKENS, dtype=torch.int32),
        positions=buffer(TOKENS, dtype=torch.int64),
        seq_lens=buffer(ROWS, dtype=torch.int32),
        query_start_loc=buffer(ROWS + 1, dtype=torch.int32),
        arange_np=np.arange(TOKENS),
        prepare_inputs_event=Event(),
        valid_sampled_token_count_event=Event(),
        valid_sampled_token_count_cpu=torch.zeros(ROWS, dtype=torch.int64),
        _progress=None,
        _always_exact=None,
        _exact=None,
        _schedule=None,
        _num_drafts=None,
        _indices=None,
    )
    made._become_optimistic()
    return made


def prepare(runner: Any, names: list[str], computed: list[int], tokens: list[int], drafts: list[int]) -> Any:
    """What `_prepare_inputs` does of a step once vLLM has sent its values."""
    batch = runner.input_batch
    batch.req_ids, batch.num_reqs = names, len(names)
    batch.req_id_to_index = {name: row for row, name in enumerate(names)}
    batch.num_computed_tokens_cpu[: len(names)] = computed
    runner.query_start_loc.gpu[1 : len(names) + 1] = torch.tensor(tokens).cumsum(0)
    runner.seq_lens.gpu[: len(names)] = torch.tensor(computed) + torch.tensor(tokens)
    runner._num_drafts = np.array(drafts, dtype=np.int32) if any(drafts) else None
    metadata = SimpleNamespace(draft_token_ids=torch.zeros(sum(drafts), dtype=torch.int32)) if any(drafts) else None
    runner._correct_inputs(metadata)
    return metadata


def sample(runner: Any, counts: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """What the drafter's first part does: it hands over the next tokens and the counts."""
    stream = SimpleNamespace(wait_stream=lambda other: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda given: contextlib.nullcontext())
    runner.valid_sampled_token_count_copy_stream = stream
    runner._copy_valid_sampled_token_count(
        torch.arange(len(counts), dtype=torch.int32), torch.tensor(counts, dtype=torch.int32)
    )
    runner.input_batch.prev_req_id_to_index = {name: row for row, name in enumerate(runner.input_batch.req_ids)}


def schedule(runner: Any, **cached: tuple[int, int]) -> None:
    runner._schedule = SimpleNamespace(
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(cached),
            num_computed_tokens=[computed for computed, _ in cached.values()],
            num_output_tokens=[outputs for _, outputs in cached.values()],
        )
    )
