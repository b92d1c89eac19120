"""The plugin runs in processes of others, whose `torch.set_default_device` must not move its host tensors."""

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "vllm_async_spec"
OWN_PROCESSES = {"compat", "demo"}
"""Parts that run in processes of their own."""
MAKERS = {"tensor", "arange", "zeros", "ones", "full", "empty", "rand", "randint", "randn"}


def without_device(source: str) -> list[int]:
    """Lines on which a tensor is made on whatever device is the default."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "torch"
        and node.func.attr in MAKERS
        and not {"device", None} & {each.arg for each in node.keywords}
    ]


def test_each_tensor_names_its_device():
    files = {str(each.relative_to(PACKAGE)): each for each in sorted(PACKAGE.rglob("*.py"))}
    found = {name: without_device(each.read_text()) for name, each in files.items()}
    assert found["vllm_plugin/patches/metadata.py"] == found["metadata.py"] == []
    assert {name: at for name, at in found.items() if at and Path(name).parts[0] not in OWN_PROCESSES} == {}


def test_a_tensor_without_a_device_is_found():
    assert without_device("import torch\ntorch.zeros(1, device='cpu')\ntorch.zeros(1)\n") == [3]
