"""What shows that stock vLLM is wrong, shared by the tests of unpacked releases and by those on a GPU."""

from __future__ import annotations

import ast
import importlib
import inspect
import textwrap
from types import SimpleNamespace
from typing import Any

import torch

from vllm_async_spec.vllm_plugin.patches.context_parallel_lengths import take_device_lengths

RANKS = 2
EXACT = [33, 100, 17]
BOUND = [36, 103, 20]
"""Three drafts of each request are in flight, and the device has rejected them."""


def context_parallel_lengths(
    device: torch.device, *, host: list[int], mended: bool = False
) -> tuple[list[int], list[int]]:
    """What the V1 runner's own lines tell kernels of each request's part on this GPU, run by a stand-in."""
    module: Any = importlib.import_module("vllm.v1.worker.gpu_model_runner")
    lines = _only(module.GPUModelRunner._build_attention_metadata, ast.If, "self.dcp_local_seq_lens.cpu[")
    count = len(EXACT)
    exact, known = (torch.tensor(each, dtype=torch.int32) for each in (EXACT, host))
    buffer = SimpleNamespace(cpu=torch.zeros(count, dtype=torch.int32), gpu=torch.zeros(count, dtype=torch.int32))
    buffer.gpu, buffer.np = buffer.gpu.to(device), buffer.cpu.numpy()
    buffer.copy_to_gpu = lambda n: buffer.gpu[:n].copy_(buffer.cpu[:n])
    on_device = exact.to(device)
    runner = SimpleNamespace(
        dcp_world_size=RANKS,
        dcp_rank=0,
        use_async_spec_decode=True,
        parallel_config=SimpleNamespace(cp_kv_cache_interleave_size=1),
        optimistic_seq_lens_cpu=known,
        seq_lens=on_device,
        dcp_local_seq_lens=buffer,
    )
    if mended:
        take_device_lengths(runner)
    given = SimpleNamespace()
    scope = {"self": runner, "cm_base": given, "num_reqs": count, "num_reqs_padded": count}
    _run(lines, vars(module) | scope)
    right = module.get_dcp_local_seq_lens(exact, RANKS, 0, 1)
    return given.dcp_local_seq_lens.tolist(), right.tolist()


def check_context_parallel_lengths(device: str) -> None:
    """Stock tells kernels of rejected drafts where the host knows a bound; the plugin does not."""
    given, right = context_parallel_lengths(torch.device(device), host=BOUND)
    assert all(more > exact for more, exact in zip(given, right, strict=True)), (given, right)
    for host, mended in ((EXACT, False), (BOUND, True)):
        given, right = context_parallel_lengths(torch.device(device), host=host, mended=mended)
        assert given == right


def lengths_of_a_late_device(*, asynchronous: bool) -> tuple[list[int], list[int]]:
    """Run the lines of the V1 runner from 0.19 on that send computed tokens, on a device that copies late."""
    module: Any = importlib.import_module("vllm.v1.worker.gpu_model_runner")
    runner, draft = module.GPUModelRunner, importlib.import_module("vllm.v1.spec_decode.eagle").EagleProposer
    device, host = _LateTensor(), torch.tensor(EXACT, dtype=torch.int32)
    stand_in = SimpleNamespace(
        input_batch=SimpleNamespace(num_computed_tokens_cpu_tensor=host),
        num_computed_tokens=device,
        use_async_spec_decode=asynchronous,
        valid_sampled_token_count_gpu=None,
    )
    count = len(EXACT)
    scope: dict[str, Any] = {"self": stand_in, "num_reqs": count, "num_reqs_padded": count}
    _run(_only(runner._prepare_inputs, ast.If, "self.num_computed_tokens[:num_reqs].copy_("), scope)
    _run(_only(runner._build_attention_metadata, ast.Assign, "num_computed_tokens_cpu = self.input_batch"), scope)
    _run(_only(runner._build_attention_metadata, ast.If, "num_computed_tokens_cpu = None"), scope)
    given = SimpleNamespace(_num_computed_tokens_cpu=scope["num_computed_tokens_cpu"])
    adds = "_num_computed_tokens_cpu += 1"
    owner = next(each for each in draft.__mro__ if adds in inspect.getsource(each))
    _run(_only(owner, ast.If, adds), {"common_attn_metadata": given})
    return EXACT, device.arrived()


class _LateTensor:
    def __init__(self) -> None:
        self._sent: torch.Tensor | None = None

    def __getitem__(self, rows: slice) -> _LateTensor:
        return self

    def copy_(self, source: torch.Tensor, non_blocking: bool = False) -> None:
        self._sent = source if non_blocking else source.clone()

    def arrived(self) -> list[int]:
        assert self._sent is not None
        return self._sent.tolist()


def _only(owner: Any, kind: type[ast.stmt], text: str) -> ast.stmt:
    tree = ast.parse(textwrap.dedent(inspect.getsource(owner)))
    found = [node for node in ast.walk(tree) if isinstance(node, kind) and text in ast.unparse(node)]
    inner = [node for node in found if not any(other is not node and other in ast.walk(node) for other in found)]
    assert len(inner) == 1, f"{len(inner)} statements of {owner.__qualname__} have {text!r}"
    return inner[0]


def _run(statement: ast.stmt, scope: dict[str, Any]) -> None:
    exec(compile(ast.Module(body=[statement], type_ignores=[]), "", "exec"), scope)
