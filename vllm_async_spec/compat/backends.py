"""vLLM's own metadata builders by name, and how each is made without a model, for any release that has it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm_async_spec.compat.cases import BLOCK_SIZE, NUM_BLOCKS, release_metadata
from vllm_async_spec.compat.check import Subject, SubjectError, failure_sentence
from vllm_async_spec.compat.device import Device
from vllm_async_spec.compat.setting import Setting

__all__ = ["BACKENDS", "AbsentError", "Backend", "backend_subject"]

_IN = "vllm.v1.attention.backends."


class AbsentError(SubjectError):
    """This release of vLLM does not have the backend."""


@dataclass(frozen=True, slots=True)
class Backend:
    """One builder of vLLM's.

    Attributes:
        name: What the tables call it; as vLLM spells the backend, where it has one name.
        places: `module:class` in one release or another; the first that exists is taken.
        make: Makes the builder from the class and a setting.
        block_size: Tokens in a block of its KV cache.
    """

    name: str
    places: tuple[str, ...]
    make: Callable[[Any, Setting], Any]
    block_size: int = BLOCK_SIZE


def _plain(cls: Any, setting: Setting) -> Any:
    return cls(*setting.arguments())


def _flex(cls: Any, setting: Setting) -> Any:
    arguments = setting.arguments()
    arguments[2].cache_config.num_gpu_blocks = NUM_BLOCKS
    return cls(*arguments)


BACKENDS: dict[str, Backend] = {
    backend.name: backend
    for backend in (
        Backend("FLASH_ATTN", (f"{_IN}flash_attn:FlashAttentionMetadataBuilder",), _plain),
        Backend("TRITON_ATTN", (f"{_IN}triton_attn:TritonAttentionMetadataBuilder",), _plain),
        Backend("FLEX_ATTENTION", (f"{_IN}flex_attention:FlexAttentionMetadataBuilder",), _flex),
    )
}
"""All, in the order of the tables."""


def backend_subject(name: str) -> Subject:
    """The builder of vLLM's that `name` names, in the vLLM that is imported here.

    Args:
        name: A key of `BACKENDS`, in any case.

    Returns:
        What `check` takes.

    Raises:
        SubjectError: There is none of this name, it can't be imported here, or there is no vLLM.
        AbsentError: This release does not have it.
    """
    backend = BACKENDS.get(name.upper())
    if backend is None:
        known = ", ".join(BACKENDS)
        raise SubjectError(f"there is no backend {name!r}; there are {known}, and module:Builder names one of your own")
    try:
        import vllm
    except ImportError as error:
        raise SubjectError(f"{backend.name} is vLLM's, and {error}; give --vllm-source DIR or install vLLM") from None
    cls = _find(backend, vllm.__version__)

    def make(device: Device) -> Any:
        return backend.make(cls, Setting(device.device))

    return Subject(backend.name, make, release_metadata(), f"vLLM {vllm.__version__}", backend.block_size)


def _find(backend: Backend, release: str) -> Any:
    for place in backend.places:
        module, _, name = place.partition(":")
        try:
            return getattr(importlib.import_module(module), name)
        except ModuleNotFoundError as error:
            if error.name is None or not module.startswith(error.name):
                raise SubjectError(f"{backend.name} can't be imported here: {failure_sentence(error)}") from error
        except AttributeError:
            continue
        except Exception as error:
            raise SubjectError(f"{backend.name} can't be imported here: {failure_sentence(error)}") from error
    raise AbsentError(f"vLLM {release} has no {backend.name}")
