"""Inputs of a metadata builder: a model's configuration, its KV-cache spec, and a machine.

A third-party factory gets a `BuilderInputs` and takes what its builder needs. Some of vLLM's own builders also need a
GPU of a certain compute capability, or the state of a machine with several GPUs.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import importlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import FunctionType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from vllm_async_spec.compat.builders import llama_config, ngram_drafts
from vllm_async_spec.compat.cases import BLOCK_SIZE, DRAFT_TOKENS, MAX_MODEL_LEN
from vllm_async_spec.compat.model_shapes import TINY, Model
from vllm_async_spec.compat.vllm_source import loaded_source
from vllm_async_spec.patching import temporarily

if TYPE_CHECKING:
    from vllm.config import VllmConfig

LAYER = "model.layers.0.self_attn.attn"
"""The name of the only layer of every builder."""

HEADS, KV_HEADS, HEAD_SIZE = TINY.heads, TINY.kv_heads, TINY.head_size
"""Query heads, KV heads, and head size of the model whose attention the suite runs."""

MAX_BATCHED_TOKENS = 8192
"""Query tokens of a step at most: the default of `vllm serve` on an H200."""

HOPPER, BLACKWELL = (9, 0), (10, 0)
"""Compute capabilities: an H200's, and a B200's."""

_ASKED_ONCE = ("vllm.utils.flashinfer",)
"""Modules whose functions cache facts about the machine."""


class SubjectError(RuntimeError):
    """A builder can't be made; the message is one sentence that says what to do."""


class AbsentError(SubjectError):
    """This release of vLLM lacks the builder, or the builder is for another machine; `cell` is a reason for a table."""

    def __init__(self, message: str, cell: str = "this release has none") -> None:
        super().__init__(message)
        self.cell = cell


@dataclass(frozen=True, slots=True)
class BuilderInputs:
    """Inputs for making a builder.

    Attributes:
        device: Device of the builder's buffers: a GPU or a simulated device. Pass it on unchanged.
        model: The model whose numbers the configuration has.
        asked: Names of the models whose configuration was asked for. If none was, all models give the same builder.
    """

    device: torch.device
    model: Model = TINY
    asked: list[str] = field(default_factory=list, compare=False)

    def vllm_config(self, **engine_args: Any) -> VllmConfig:
        """A new configuration of two layers with the model's numbers, with `DRAFT_TOKENS` n-gram drafts.

        `engine_args` are arguments of vLLM's `EngineArgs`; they override the defaults here.
        """
        self.asked.append(self.model.name)
        drafts = ngram_drafts(DRAFT_TOKENS)
        limits = {"max_num_seqs": 256, "max_num_batched_tokens": MAX_BATCHED_TOKENS}
        wanted = {"block_size": BLOCK_SIZE, "speculative_config": drafts} | limits | engine_args
        source = loaded_source()
        key = repr((self.model.name, sorted(wanted.items()), source and source.capability))
        if key not in _MADE:
            _MADE[key] = _config(self.model, wanted)
        return copy.deepcopy(_MADE[key])

    def arguments(self, **engine_args: Any) -> tuple[Any, list[str], VllmConfig, torch.device]:
        """The arguments of every full-attention builder: KV-cache spec, layer names, configuration, device.

        `engine_args` are those of `vllm_config`.
        """
        config = self.vllm_config(**engine_args)
        return _kv_cache_spec(self.model, config), [LAYER], config, self.device

    @staticmethod
    def construct(cls: Any, *arguments: Any) -> Any:
        """Make a builder as an engine does: while its configuration, `arguments[2]`, is vLLM's current one."""
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(arguments[2]):
            return cls(*arguments)


def _config(model: Model, wanted: dict[str, Any]) -> VllmConfig:
    config = llama_config(
        wanted,
        num_heads=model.heads,
        num_kv_heads=model.kv_heads,
        head_size=model.head_size,
        max_model_len=MAX_MODEL_LEN,
    )
    for target in (config.model_config.hf_config, config.model_config.hf_text_config):
        for name, value in model.attributes.items():
            setattr(target, name, value)
    # No process of the other ranks exists; builders only divide by their number.
    config.parallel_config.tensor_parallel_size = model.tensor_parallel
    cache: Any = config.cache_config
    if model.cache_dtype != "auto":
        cache.cache_dtype = model.cache_dtype
    return config


def _kv_cache_spec(model: Model, config: VllmConfig) -> Any:
    """The spec of the KV cache of full attention, or of sliding-window attention if the model's layers have it."""
    interface: Any = importlib.import_module("vllm.v1.kv_cache_interface")
    kind = interface.FullAttentionSpec if model.window is None else interface.SlidingWindowSpec
    known = {each.name for each in dataclasses.fields(kind)}
    sizes: dict[str, Any] = {
        "block_size": config.cache_config.block_size,
        "num_kv_heads": config.model_config.get_num_kv_heads(config.parallel_config),
        "head_size": model.head_size,
        "dtype": torch.bfloat16,
        "sliding_window": model.window,
    }
    if model.cache_dtype != "auto":
        sizes["dtype"] = torch.uint8  # vLLM stores FP8 as bytes
        if "kv_quant_mode" in known:  # since 0.19
            sizes["kv_quant_mode"] = interface.get_kv_quant_mode(model.cache_dtype)
    return kind(**{name: value for name, value in sizes.items() if name in known})


_MADE: dict[str, VllmConfig] = {}
"""Cache, because making a configuration takes vLLM longer than building a batch."""


@contextlib.contextmanager
def configured(builder: Any) -> Iterator[None]:
    """Make a vLLM builder's configuration and a workspace the current ones, as in an engine; else do nothing."""
    config = getattr(builder, "vllm_config", None)
    if config is None or "vllm" not in sys.modules:
        yield
        return
    from vllm.config import set_current_vllm_config

    with set_current_vllm_config(config), workspace(getattr(builder, "device", torch.device("cpu"))):
        yield


def stand_on(capability: tuple[int, int] | None, name: str) -> None:
    """Make an unpacked release see a GPU of this compute capability, if given; else check the real GPU for `name`.

    Raises:
        AbsentError: vLLM is installed, not unpacked, and finds another GPU or none.
    """
    source = loaded_source()
    if source is not None:
        wanted = capability or HOPPER
        if source.capability != wanted:
            source.capability = wanted
            _forget()
        return
    if capability is None:
        return
    found = importlib.import_module("vllm.platforms").current_platform.get_device_capability()
    if found is None or tuple(found) != capability:
        has = "has none" if found is None else f"has {found[0]}.{found[1]}"
        wanted_name = f"compute capability {capability[0]}.{capability[1]}"
        raise AbsentError(f"{name} needs {wanted_name}, and this machine {has}", f"needs {wanted_name}")


def _forget() -> None:
    for name in _ASKED_ONCE:
        for value in list(vars(sys.modules.get(name, SimpleNamespace())).values()):
            # A patch of the plugin may have wrapped a function that caches too.
            while isinstance(value, FunctionType | functools._lru_cache_wrapper):
                if hasattr(value, "cache_clear"):
                    value.cache_clear()
                value = getattr(value, "__wrapped__", None)


@contextlib.contextmanager
def context_parallel(config: Any) -> Iterator[None]:
    """Make `config` and the process look like rank 0 of two that share each request's KV cache.

    There is only one process, so code inside the context must not communicate. The change of `config` is not undone.
    """
    config.parallel_config.decode_context_parallel_size = 2
    state: Any = importlib.import_module("vllm.distributed.parallel_state")
    group = SimpleNamespace(world_size=2, rank_in_group=0)
    with temporarily() as changes:
        changes.set(state, "_DCP", group)
        yield


@contextlib.contextmanager
def workspace(device: torch.device) -> Iterator[None]:
    """Give builders and layers a scratch workspace, which an engine makes at start-up."""
    try:
        workspace: Any = importlib.import_module("vllm.v1.worker.workspace")
    except ModuleNotFoundError:
        yield
        return

    def get_simultaneous(*wanted: tuple[tuple[int, ...], torch.dtype]) -> list[torch.Tensor]:
        return [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in wanted]

    with temporarily() as changes:
        changes.set(workspace, "_manager", SimpleNamespace(get_simultaneous=get_simultaneous))
        yield
