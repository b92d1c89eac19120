"""Host time of the optimistic runner's additions to a step, and of the vLLM code that they replace.

    python -m benchmarks step-time [--json FILE] [--batch N] [--rounds N]

It needs vLLM 0.14 to 0.18 and a GPU. Both runners are vLLM's own class, stock and patched, without a model, and they
alternate. The device is idle, so nothing waits: the result is a step's cost on the host, not what it saves.
"""

import importlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from rich.table import Table

from benchmarks.machine import MachineError
from benchmarks.present import Grid
from benchmarks.statistics import summary
from benchmarks.timing import microseconds_on_an_idle_device
from vllm_async_spec.patching import temporarily
from vllm_async_spec.vllm_plugin.ledger import find_patch
from vllm_async_spec.vllm_plugin.patches.optimistic_runner import IMPLEMENTATIONS

DRAFTS = 3
_ALL = "all that differs"


def measure(batch: int, rounds: int) -> dict[str, Any]:
    """The result file: microseconds a step, of each part, over `rounds` rounds.

    Raises:
        MachineError: there is no CUDA device, or this vLLM's runner does not need the patch.
    """
    if not torch.cuda.is_available():
        raise MachineError("PyTorch finds no CUDA device; run this on a machine with a GPU")
    import vllm

    module = importlib.import_module("vllm.v1.worker.gpu_model_runner")
    patch = IMPLEMENTATIONS["optimistic-runner"]
    if not find_patch("optimistic-runner").covers(vllm.__version__):
        raise MachineError(f"vLLM {vllm.__version__} does not need the patch optimistic-runner; take 0.14 to 0.18")
    stock = _Step(module.GPUModelRunner, batch)
    with temporarily() as transaction:
        patch.apply(transaction, module)
        patched = _Step(module.GPUModelRunner, batch)
    patched.runner._become_optimistic()
    for step in (stock, patched):
        step.times()  # warm-up: compilation and first allocations
    times: dict[str, dict[str, list[float]]] = {}
    for _ in range(rounds // 2):
        for kind, step in (("stock", stock), ("patched", patched), ("patched", patched), ("stock", stock)):
            for part, microseconds in step.times().items():
                times.setdefault(part, {}).setdefault(kind, []).append(microseconds)
    return {
        "vllm": vllm.__version__,
        "device": torch.cuda.get_device_name(),
        "batch": batch,
        "parts": {part: {kind: summary(values) for kind, values in kinds.items()} for part, kinds in times.items()},
    }


def table(found: dict[str, Any]) -> Table:
    rows = [(part, *in_words(kinds)) for part, kinds in found["parts"].items()]
    title = f"vLLM {found['vllm']}, batch {found['batch']}, µs a step"
    return Grid(("part", "stock", "patched"), rows).table(title)


def in_words(kinds: dict[str, Any]) -> tuple[str, str]:
    """Stock and patched, such as `61.2 (58.0-70.1)`; a dash if a runner lacks the part."""
    rows = [kinds.get(kind) for kind in ("stock", "patched")]
    first, second = (f"{row['median']:.1f} ({row['least']:.1f}-{row['most']:.1f})" if row else "-" for row in rows)
    return first, second


class _Step:
    """The parts that differ, in a step in which every request decodes with drafts."""

    def __init__(self, runner_class: type[Any], batch: int) -> None:
        self.runner = runner = object.__new__(runner_class)
        tokens = batch * (1 + DRAFTS)
        device = torch.device("cuda")
        self._drafts = np.full(batch, DRAFTS, dtype=np.int32)
        self._ends = np.arange(1, batch + 1, dtype=np.int32) * (1 + DRAFTS)
        self._next = torch.zeros(batch, dtype=torch.int32, device=device)
        self._counts = torch.ones(batch, dtype=torch.int32, device=device)
        block_table = SimpleNamespace(
            block_table=_buffer(batch, 16, dtype=torch.int32),
            block_size=16,
            slot_mapping=_buffer(tokens, dtype=torch.int64),
        )
        names = [f"request-{row}" for row in range(batch)]
        self._schedule = SimpleNamespace(scheduled_spec_decode_tokens={name: [-1] * DRAFTS for name in names})
        vars(runner).update(
            device=device,
            max_num_reqs=batch,
            max_num_tokens=tokens,
            num_spec_tokens=DRAFTS,
            pin_memory=True,
            enable_prompt_embeds=False,
            _draft_token_ids=torch.zeros(batch, DRAFTS, dtype=torch.int64, device=device),
            supports_mm_inputs=False,
            uses_mrope=False,
            uses_xdrope_dim=0,
            arange_np=np.arange(tokens),
            input_ids=_buffer(tokens, dtype=torch.int32),
            positions=_buffer(tokens, dtype=torch.int64),
            seq_lens=_buffer(batch, dtype=torch.int32),
            query_start_loc=_buffer(batch + 1, dtype=torch.int32),
            prepare_inputs_event=torch.cuda.Event(),
            valid_sampled_token_count_event=torch.cuda.Event(),
            valid_sampled_token_count_copy_stream=torch.cuda.Stream(),
            valid_sampled_token_count_cpu=torch.zeros(batch, dtype=torch.int64).pin_memory(),
            drafter=SimpleNamespace(backup_next_token_ids=_buffer(batch, dtype=torch.int32)),
            input_batch=SimpleNamespace(
                req_ids=names,
                req_id_to_index={name: row for row, name in enumerate(names)},
                num_reqs=batch,
                prev_req_id_to_index={name: row for row, name in enumerate(names)},
                prev_sampled_token_ids=self._next.unsqueeze(1),
                num_computed_tokens_cpu=np.full(batch, 100, dtype=np.int32),
                block_table=SimpleNamespace(block_tables=[block_table]),
                no_penalties=True,
                bad_words_token_ids={},
                sampling_metadata=SimpleNamespace(output_token_ids=[]),
                logitsprocs=SimpleNamespace(all=[]),
            ),
            _progress=None,
            _always_exact=None,
            _exact=None,
            _num_drafts=self._drafts,
            _indices=None,
        )

    def times(self) -> dict[str, float]:
        """Microseconds of each part."""
        runner = self.runner
        parts: dict[str, Callable[[], Any]] = {
            "accepted counts of the last step": runner._get_valid_sampled_token_count,
            "tokens of the last step": lambda: runner._prepare_input_ids(self._schedule, self._ends[-1], self._ends),
            "indices of drafts": lambda: runner._calc_spec_decode_metadata(self._drafts, self._ends),
            "after sampling": lambda: runner._copy_valid_sampled_token_count(self._next, self._counts),
        }
        if hasattr(runner, "_correct_inputs"):
            metadata = SimpleNamespace(draft_token_ids=torch.zeros(self._drafts.sum(), dtype=torch.int32))
            parts["what the device knows"] = lambda: runner._correct_inputs(metadata)
        found = {part: microseconds_on_an_idle_device(call) for part, call in parts.items()}
        return {_ALL: sum(found.values())} | found


def _buffer(*size: int, dtype: torch.dtype) -> Any:
    from vllm.v1.utils import CpuGpuBuffer

    return CpuGpuBuffer(*size, dtype=dtype, device=torch.device("cuda"), pin_memory=True)
