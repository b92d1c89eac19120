"""The plugin runs in processes of others, whose `torch.set_default_device` must not move its host tensors."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "vllm_async_spec"
PARTS = ("vllm_plugin", "attention", "spec_decode", "kernels")
MAKERS = {"tensor", "arange", "zeros", "ones", "full", "empty", "rand", "randint", "randn"}


def without_device(source: str) -> list[int]:
    """Lines on which a tensor is made on whatever device is the default."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and (node.func.value.id, node.func.attr in MAKERS) == ("torch", True)
        and not {"device", None} & {each.arg for each in node.keywords}
    ]


@pytest.mark.parametrize("part", PARTS)
def test_each_tensor_names_its_device(part: str):
    files = sorted((PACKAGE / part).rglob("*.py"))
    assert files
    found = {str(each.relative_to(PACKAGE)): without_device(each.read_text()) for each in files}
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_a_tensor_without_a_device_is_found():
    assert without_device("import torch\ntorch.zeros(1, device='cpu')\ntorch.zeros(1)\n") == [3]
