"""The former name of `compat.builder_inputs`, for one release."""

from __future__ import annotations

import warnings
from typing import Any

from vllm_async_spec.compat.builder_inputs import BuilderInputs


def __getattr__(name: str) -> Any:
    if name != "Setting":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    message = "vllm_async_spec.compat.setting.Setting is now vllm_async_spec.compat.builder_inputs.BuilderInputs"
    warnings.warn(message, DeprecationWarning, stacklevel=2)
    return BuilderInputs
