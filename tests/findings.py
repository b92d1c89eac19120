"""What shows that stock vLLM is wrong, shared by the tests of unpacked releases and by those on a GPU."""

from __future__ import annotations

import ast
import importlib
import inspect
import textwrap
from types import SimpleNamespace
from typing import Any

import torch

RANKS = 2
EXACT = [33, 100, 17]
BOUND = [36, 103, 20]
"""Three drafts of each request are in flight, and the device has rejected them."""


def context_parallel_lengths(device: torch.device, *, host: list[int]) -> tuple[list[int], list[int]]:
    """Run the lines of the V1 runner that tell kernels how much of each request lies on this GPU.

    They are compiled from the source of the vLLM that is imported, and run by a stand-in for the runner.

    Args:
        device: Of the runner.
        host: What the runner's host knows of the lengths; the device knows `EXACT`.

    Returns:
        What kernels are given, and what they would be given of exact lengths.
    """
    module: Any = importlib.import_module("vllm.v1.worker.gpu_model_runner")
    lines = _statement(module.GPUModelRunner._build_attention_metadata, "dcp_world_size", "dcp_local_seq_lens")
    count = len(EXACT)
    exact, known = (torch.tensor(each, dtype=torch.int32) for each in (EXACT, host))
    buffer = SimpleNamespace(cpu=torch.zeros(count, dtype=torch.int32), gpu=torch.zeros(count, dtype=torch.int32))
    buffer.gpu = buffer.gpu.to(device)
    buffer.copy_to_gpu = lambda n: buffer.gpu[:n].copy_(buffer.cpu[:n])
    on_device = exact.to(device)
    runner = SimpleNamespace(
        dcp_world_size=RANKS,
        dcp_rank=0,
        parallel_config=SimpleNamespace(cp_kv_cache_interleave_size=1),
        optimistic_seq_lens_cpu=known,
        seq_lens=on_device,
        dcp_local_seq_lens=buffer,
    )
    given = SimpleNamespace()
    scope = {"self": runner, "cm_base": given, "num_reqs": count, "num_reqs_padded": count}
    exec(compile(lines, module.__file__ or "", "exec"), vars(module) | scope)
    right = module.get_dcp_local_seq_lens(exact, RANKS, 0, 1)
    return given.dcp_local_seq_lens.tolist(), right.tolist()


def _statement(function: Any, test: str, target: str) -> ast.Module:
    """The `if` of `function` whose condition has `test` and whose body has `target`, where it stands in its file."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    found = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and test in ast.unparse(node.test) and target in ast.unparse(node.body[0])
    ]
    assert len(found) == 1, f"{len(found)} statements of {function.__qualname__} set {target}"
    return ast.Module(body=[found[0]], type_ignores=[])
