"""A finding about vLLM's CPU build: its rotary embedding of tensors that have a dimension for heads, as MLA's have."""

import subprocess
import sys

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.slow]

ROTATED = """
import importlib.util, sys
if importlib.util.find_spec("vllm") is None:
    sys.exit("there is no vLLM")
import torch
from vllm.platforms import current_platform
if not current_platform.is_cpu():
    sys.exit("there is no CPU platform")
current_platform.import_kernels()
from vllm import _custom_ops as ops
tokens, heads, size = 7, 4, 64
query = torch.randn(tokens, heads, size)
angles = torch.rand(100, size // 2)
cache = torch.cat([angles.cos(), angles.sin()], dim=-1)
flat, split = query.reshape(tokens, -1).clone(), query.clone()
for each in (flat, split):
    ops.rotary_embedding(torch.arange(3, 3 + tokens), each, None, size, cache, False)
rows = lambda found: (found.view(tokens * heads, size) != query.view(tokens * heads, size)).any(-1).tolist()
print(rows(flat) == [True] * tokens * heads, rows(split) == [True] * tokens + [False] * tokens * (heads - 1))
"""


def test_a_cpus_rotary_embedding_rotates_other_rows_where_heads_have_a_dimension():
    """It takes heads for tokens. What is rotated of a request then depends on where in the batch it is."""
    done = subprocess.run([sys.executable, "-c", ROTATED], capture_output=True, text=True)
    if done.stderr.strip().endswith(("there is no vLLM", "there is no CPU platform")):
        pytest.skip(done.stderr.splitlines()[-1])
    assert done.stdout.splitlines()[-1] == "True True", done.stderr[-2000:]
