"""No value and no alignment makes Triton compile a kernel again, for which a request would wait."""

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

import vllm_async_spec.kernels

triton = pytest.importorskip("triton", reason="Triton is not installed")

INTEGERS = {
    "correct_inputs": {"sampled_stride", "draft_row_stride", "draft_stride", "row_stride"},
    "last_page_lens": {"page_size", "batch"},
    "pages": {"row_stride", "page_size"},
    "work_lens": {"works"},
    "chunks": {"limit", "batch", "works"},
    "advance_batch": {"sampled_stride", "draft_row_stride", "draft_stride", "batch", "tokens", "size"},
    "split_by_chunks": {"rows"},
    "gather_pages": {"row_stride", "column_stride", "last_column"},
}
"""The integers of each kernel; its other arguments are tensors or constants."""


def kernels() -> dict[str, Any]:
    folder = Path(vllm_async_spec.kernels.__file__).parent
    modules = [importlib.import_module(f"vllm_async_spec.kernels.{each.stem}") for each in folder.glob("*_triton.py")]
    return {
        name: each for module in modules for name, each in vars(module).items() if type(each).__name__ == "JITFunction"
    }


def key(kernel: Any, integers: set[str], number: int, offset: int) -> object:
    """What Triton finds a compiled kernel by, if each integer is `number` and each tensor begins at an offset."""
    jit = importlib.import_module("triton.runtime.jit")
    if not hasattr(jit, "create_function_from_signature"):
        pytest.skip(f"Triton {triton.__version__} chooses a compiled kernel in another function than this test reads")
    backend = triton.compiler.make_backend(
        importlib.import_module("triton.backends.compiler").GPUTarget("cuda", 90, 32)
    )
    tensor = torch.zeros(32, dtype=torch.int32)[offset:]
    given = [16 if each.is_constexpr else number if each.name in integers else tensor for each in kernel.params]
    return jit.create_function_from_signature(kernel.signature, kernel.params, backend)(*given)[1]


def test_all_kernels_are_here():
    assert kernels().keys() == INTEGERS.keys()


@pytest.mark.parametrize("name", INTEGERS)
def test_a_kernel_is_not_compiled_again_for_other_numbers_and_alignments(name: str):
    keys = [key(kernels()[name], INTEGERS[name], number, offset) for number, offset in ((16, 0), (1, 1), (17, 2))]
    assert keys[0] == keys[1] == keys[2]


def test_a_kernel_without_the_decorator_is_compiled_again():
    plain = triton.jit(kernels()["gather_pages"].fn)
    assert key(plain, INTEGERS["gather_pages"], 16, 0) != key(plain, INTEGERS["gather_pages"], 16, 1)
    assert key(plain, INTEGERS["gather_pages"], 16, 0) != key(plain, INTEGERS["gather_pages"], 1, 0)
