"""Names what a loaded vLLM release needs and neither this environment nor the stubs have, from the error it caused."""

from __future__ import annotations

import re
import traceback
from pathlib import Path

from vllm_async_spec.compat.error_text import message_of
from vllm_async_spec.compat.vllm_source import VllmSource, loaded_source

_STUBS = "STUBS in vllm_async_spec/compat/stubs.py"
_OPERATOR = re.compile(r"'_OpNamespace' '(\w+)' object has no attribute '(\w+)'")
"""What PyTorch says where no library has registered an operator."""


def lacking(error: BaseException) -> str | None:
    """Say in one sentence, with a remedy, what the unpacked release that raised `error` needs and the stubs lack.

    None if no module or operator is missing, or no release was loaded by `load_vllm`.
    """
    source = loaded_source()
    if source is None or not _raised_by(source, error):
        return None
    if isinstance(error, ModuleNotFoundError) and error.name is not None:
        if error.name.partition(".")[0] == "vllm":
            return f"vLLM {source.version} imports {error.name}, which is compiled and has no stub; add it to {_STUBS}"
        return (
            f"vLLM {source.version} imports {error.name}, which is neither installed nor a stub; "
            f"install the package, or add {error.name} to {_STUBS}"
        )
    said = message_of(error)
    if isinstance(error, ImportError):
        if (error.name or "").partition(".")[0] == "vllm":
            return f"vLLM {source.version} imports what is compiled and has no stub: {said}; add it to {_STUBS}"
        return f"vLLM {source.version} needs a newer package than is installed: {said}"
    if (operator := _OPERATOR.search(said)) is not None:
        name = "torch.ops.{}:{}".format(*operator.groups())
        return f"vLLM {source.version} calls {name}, which is compiled and has no stub; add it to {_STUBS}"
    return None


def _raised_by(source: VllmSource, error: BaseException) -> bool:
    """Whether the release's own code asked for what is missing: the last frame outside Python's import machinery."""
    frames = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    ours = [name for name in frames if not name.startswith("<frozen importlib") and Path(name).name != "_ops.py"]
    return bool(ours) and Path(ours[-1]).resolve().is_relative_to(source.path)
