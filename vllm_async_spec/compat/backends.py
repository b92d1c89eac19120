"""vLLM's own attention backends by name, with the inputs that check each of them in any release that has it.

`backend_builders` and `mla` make their metadata builders.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from vllm_async_spec.compat.backend_builders import (
    Way,
    before_hopper,
    cascade_builder,
    cpu_builder,
    cross_attention_builder,
    encoder_only_builder,
    fast_prefill_builder,
    flash_attention_2_builder,
    flash_attention_dcp_builder,
    flashinfer_builder,
    flex_builder,
    local_attention_builder,
    mamba_builder,
    plain_builder,
    triton_backend,
)
from vllm_async_spec.compat.batch_fields import accepted_fields, encoder_fields, logits_fields
from vllm_async_spec.compat.builder_inputs import BLACKWELL, AbsentError, BuilderInputs, SubjectError, stand_on
from vllm_async_spec.compat.builders import is_absent
from vllm_async_spec.compat.cases import BLOCK_SIZE, Call, Case, release_metadata
from vllm_async_spec.compat.check import failure_sentence
from vllm_async_spec.compat.device import Device
from vllm_async_spec.compat.layer import NO_KERNEL_RUNS, NOT_TINY, NOTHING_COMPILED, ImplLayer, Layer
from vllm_async_spec.compat.mla import MlaLayer, indexer_builder, mla_builder, mla_prefill_builder, sparse_mla_builder
from vllm_async_spec.compat.model import FIELDS
from vllm_async_spec.compat.model_shapes import MODELS, MODELS_OF, TINY, Model, why_not_for
from vllm_async_spec.compat.simulated_device import HostDevice
from vllm_async_spec.compat.stubs import install_flashinfer
from vllm_async_spec.compat.subject import Subject
from vllm_async_spec.compat.vllm_source import loaded_source

_IN = "vllm.v1.attention.backends."
_LOCAL_CHUNK = 64
"""Tokens per chunk of chunked local attention."""


MakeLayer = Callable[[Any, Any, Device, int], Layer]
"""Makes a layer from the class or factory found, a builder, the device, and the KV cache's block size in tokens."""


def _layer(**how: Any) -> MakeLayer:
    return lambda found, builder, device, block_size: ImplLayer(found, builder, device, block_size, **how)


def _triton_layer(**how: Any) -> MakeLayer:
    """As `_layer`, for a factory that wraps the Triton backend."""
    return lambda found, builder, device, block_size: ImplLayer(triton_backend(), builder, device, block_size, **how)


def _mla_layer(found: Any, builder: Any, device: Device, block_size: int) -> Layer:
    return MlaLayer(found, builder, device, block_size)


_LAYER = _layer()


@dataclass(frozen=True, slots=True)
class Backend:
    """One of vLLM's metadata builders; other attributes are those of `Subject`.

    Attributes:
        name: Its name in the tables: vLLM's name of the backend, where vLLM has one.
        places: `module:name` of a backend class or factory in different releases; the first that exists is used.
        make: Makes the builder from the builder class, or from the factory found, and the inputs.
        capability: The GPU's compute capability that the builder needs; None for an H200's, or any.
        on_host: Whether the builder's device is the host.
        layer: Makes a layer that attends with the built metadata; or a string that says why there is none.
    """

    name: str
    places: tuple[str, ...]
    make: Callable[[Any, BuilderInputs], Any]
    block_size: int = BLOCK_SIZE
    fields: Callable[[Case, Device], Mapping[str, Any]] = lambda case, device: {}
    arguments: Callable[[Case, Device], Mapping[str, Any]] = lambda case, device: {}
    layout: tuple[str, ...] = ()
    not_for: Callable[[Case], str | None] = lambda case: None
    may_refuse: Callable[[Case], str | None] = lambda case: None
    remakes: tuple[str, ...] = ()
    common_prefix: Callable[[Case], int] = lambda case: 0
    capability: tuple[int, int] | None = None
    on_host: bool = False
    layer: MakeLayer | str = _LAYER


def _of_layer(name: str) -> tuple[str, ...]:
    """The factory's places in newer releases and in older ones."""
    layers = ("vllm.model_executor.layers.attention", "vllm.attention.layers")
    return tuple(f"{folder}.{name}_attention:create_{name}_attention_backend" for folder in layers)


def _mla(block_size: int) -> Callable[[Any, BuilderInputs], Any]:
    return lambda cls, setting: mla_builder(cls, setting, block_size)


def _mla_prefill(kernels: str) -> Callable[[Any, BuilderInputs], Any]:
    return lambda cls, setting: mla_prefill_builder(setting, kernels, BLOCK_SIZE)


def _sparse(cache_dtype: str) -> Callable[[Any, BuilderInputs], Any]:
    return lambda cls, setting: sparse_mla_builder(cls, setting, cache_dtype)


def _shared_prefix(case: Case) -> int:
    """Tokens of the common prefix: whole blocks that every live request has already computed, as vLLM counts it."""
    computed = [seq - query for seq, query in zip(case.seq_lens, case.query_lens, strict=True) if seq]
    return min(computed) // BLOCK_SIZE * BLOCK_SIZE


def _shares_nothing(case: Case) -> str | None:
    if case.call is not Call.BUILD:
        return "only a step of the target model is told of a common prefix"
    return None if _shared_prefix(case) else "its requests share no full block"


def _no_drafting(case: Case) -> str | None:
    return "no draft model has layers of state space" if case.call is Call.DRAFTING else None


def _no_encoder_batch(case: Case) -> str | None:
    whole = case.query_lens == case.seq_lens and case.call is Call.BUILD
    return None if whole else "an encoder is given whole prompts only"


def _chunked_local(found: Any, setting: BuilderInputs) -> Any:
    return local_attention_builder(triton_backend(), setting, _LOCAL_CHUNK, BLOCK_SIZE)


def _flashinfer(way: Way) -> Callable[[Any, BuilderInputs], Any]:
    return lambda cls, setting: flashinfer_builder(cls, setting, way)


_FLASHINFER = f"{_IN}flashinfer:FlashInferBackend"
_FLASH = f"{_IN}flash_attn:FlashAttentionBackend"
_FLASHMLA_SPARSE = f"{_IN}mla.flashmla_sparse:FlashMLASparseBackend"
_TRITON_MLA = f"{_IN}mla.triton_mla:TritonMLABackend"
_TRITON = f"{_IN}triton_attn:TritonAttentionBackend"
_PAGE_TABLE = ("_copy_page_indices_kernel", ".page ends", ".last page")
"""Where pages lie among the indices. Kernels mask by the lengths, which the page ends and last pages give together."""
_TILES = (".scheduler_metadata",)
"""FlashAttention's work split, which its planner sizes by the longest request. Other fields hold the lengths."""
_GATHERED = (".workspace_starts",)
"""Offsets into a workspace that one kernel fills and another reads, both by these offsets."""
_TWO_RANKS = "its ranks talk to each other while they attend, and here is one"
_CHOSEN = "it attends to what an indexer chose, and the suite has none that chooses"
_STATE_SPACE: dict[str, Any] = {
    "arguments": accepted_fields,
    "may_refuse": _no_drafting,
    "layer": "a layer of state space attends to nothing",
}

BACKENDS: dict[str, Backend] = {
    backend.name: backend
    for backend in (
        Backend("FLASH_ATTN", (_FLASH,), plain_builder, layout=_TILES),
        Backend(
            "FLASH_ATTN_FA2", (_FLASH,), flash_attention_2_builder, layout=_TILES, layer=_layer(surround=before_hopper)
        ),
        Backend("FLASH_ATTN_DCP", (_FLASH,), flash_attention_dcp_builder, layout=_TILES, layer=_TWO_RANKS),
        Backend(
            "FLASH_ATTN_CASCADE",
            (_FLASH,),
            cascade_builder,
            layout=_TILES,
            not_for=_shares_nothing,
            common_prefix=_shared_prefix,
        ),
        Backend("TRITON_ATTN", (_TRITON,), plain_builder),
        Backend("FLEX_ATTENTION", (f"{_IN}flex_attention:FlexAttentionBackend",), flex_builder),
        Backend("TREE_ATTN", (f"{_IN}tree_attn:TreeAttentionBackend",), plain_builder),
        Backend(
            "TURBOQUANT",
            (f"{_IN}turboquant_attn:TurboQuantAttentionBackend",),
            plain_builder,
            layer="its KV cache is quantised, and the reference is of one that is not",
        ),
        Backend("TRITON_MLA", (_TRITON_MLA,), _mla(BLOCK_SIZE), layer=_mla_layer),
        Backend(
            "FLASH_ATTN_MLA",
            (f"{_IN}mla.flashattn_mla:FlashAttnMLABackend",),
            _mla(BLOCK_SIZE),
            layout=_TILES,
            layer=_mla_layer,
        ),
        Backend("FLASHMLA", (f"{_IN}mla.flashmla:FlashMLABackend",), _mla(64), block_size=64, layer=_mla_layer),
        Backend(
            "FLASHINFER_MLA",
            (f"{_IN}mla.flashinfer_mla:FlashInferMLABackend",),
            _mla(64),
            block_size=64,
            layer=_mla_layer,
        ),
        Backend(
            "CUTLASS_MLA", (f"{_IN}mla.cutlass_mla:CutlassMLABackend",), _mla(128), block_size=128, layer=_mla_layer
        ),
        Backend("MLA_PREFILL_FLASH_ATTN", (_TRITON_MLA,), _mla_prefill("FLASH_ATTN"), layer=_mla_layer),
        Backend(
            "MLA_PREFILL_FLASHINFER", (_TRITON_MLA,), _mla_prefill("FLASHINFER"), capability=BLACKWELL, layer=_mla_layer
        ),
        Backend(
            "MLA_PREFILL_TRTLLM", (_TRITON_MLA,), _mla_prefill("TRTLLM_RAGGED"), capability=BLACKWELL, layer=_mla_layer
        ),
        Backend("MLA_PREFILL_CUDNN", (_TRITON_MLA,), _mla_prefill("CUDNN"), capability=BLACKWELL, layer=_mla_layer),
        Backend(
            "INDEXER",
            (f"{_IN}mla.indexer:DeepseekV32IndexerBackend",),
            indexer_builder,
            block_size=64,
            layer="it chooses what others attend to",
        ),
        Backend("FLASHMLA_SPARSE", (_FLASHMLA_SPARSE,), _sparse("auto"), block_size=64, layer=_CHOSEN),
        Backend(
            "FLASHMLA_SPARSE_FP8",
            (_FLASHMLA_SPARSE,),
            _sparse("fp8_ds_mla"),
            block_size=64,
            layout=_GATHERED,
            layer=_CHOSEN,
        ),
        Backend("FLASHINFER", (_FLASHINFER,), _flashinfer(Way.NATIVE), layout=_PAGE_TABLE),
        Backend("FLASHINFER_XQA", (_FLASHINFER,), _flashinfer(Way.XQA), layout=_PAGE_TABLE),
        Backend("FLASHINFER_TRTLLM", (_FLASHINFER,), _flashinfer(Way.TRTLLM), layout=_PAGE_TABLE, capability=BLACKWELL),
        Backend(
            "FLASHINFER_DCP", (_FLASHINFER,), _flashinfer(Way.CONTEXT_PARALLEL), layout=_PAGE_TABLE, layer=_TWO_RANKS
        ),
        Backend("MAMBA1", (f"{_IN}mamba1_attn:Mamba1AttentionBackend",), mamba_builder, **_STATE_SPACE),
        Backend("MAMBA2", (f"{_IN}mamba2_attn:Mamba2AttentionBackend",), mamba_builder, **_STATE_SPACE),
        Backend("GDN", (f"{_IN}gdn_attn:GDNAttentionBackend",), mamba_builder, **_STATE_SPACE),
        Backend("LINEAR", (f"{_IN}linear_attn:LinearAttentionBackend",), mamba_builder, **_STATE_SPACE),
        Backend(
            "SHORT_CONV",
            (f"{_IN}short_conv_attn:ShortConvAttentionBackend",),
            mamba_builder,
            **_STATE_SPACE,
        ),
        Backend(
            "CHUNKED_LOCAL",
            _of_layer("chunked_local"),
            _chunked_local,
            remakes=FIELDS,
            layer=_triton_layer(chunk=_LOCAL_CHUNK),
        ),
        Backend(
            "FAST_PREFILL",
            (f"{_IN}utils:create_fast_prefill_custom_backend",),
            fast_prefill_builder,
            fields=logits_fields,
            remakes=("query_start_loc", "query_start_loc_cpu", "max_query_len", "num_actual_tokens"),
            layer=_triton_layer(last_only=True),
        ),
        Backend(
            "CROSS_ATTENTION",
            _of_layer("cross"),
            cross_attention_builder,
            fields=encoder_fields,
            remakes=("seq_lens", "max_seq_len", "slot_mapping"),
            layer="it attends to what an encoder made, and the suite has no encoder",
        ),
        Backend(
            "ENCODER_ONLY",
            _of_layer("encoder_only"),
            encoder_only_builder,
            not_for=_no_encoder_batch,
            layer=_triton_layer(encoder=True),
        ),
        # The plan is a byte buffer, which its kernel fills only in part.
        Backend(
            "CPU_ATTN",
            (f"{_IN}cpu_attn:CPUAttentionBackend",),
            cpu_builder,
            layout=("scheduler_metadata",),
            on_host=True,
        ),
    )
}
"""All backends, in the order of the tables."""


def backend_subject(name: str, device: Device, model: Model | None = None) -> Subject:
    """Describe one of vLLM's own builders for `check`, from the vLLM that this process imports.

    Args:
        name: A key of `BACKENDS`, in any case.
        device: Where the builder will be made; some modules allocate device memory on import.
        model: The model whose numbers it gets; None for the first that uses it.

    Raises:
        SubjectError: The name is unknown, the backend can't be imported here, or there is no vLLM.
        AbsentError: This release lacks the backend, the backend is for another kind of model, or the backend runs on
            the host and `device` is a GPU.
    """
    backend = BACKENDS.get(name.upper())
    if backend is None:
        known = ", ".join(BACKENDS)
        raise SubjectError(f"there is no backend {name!r}; there are {known}; name your own as module:Builder")
    model = model or MODELS[MODELS_OF[backend.name][0]]
    if (misfit := why_not_for(backend.name, model)) is not None:
        raise AbsentError(f"{backend.name} is not for {model.name}, which {misfit}", f"not for {model.name}")
    try:
        import vllm
    except ImportError as error:
        raise SubjectError(f"{backend.name} needs vLLM, and {error}; give --vllm-source DIR or install vLLM") from None
    if backend.on_host and device.device.type != "cpu":
        raise AbsentError(
            f"{backend.name} runs on the host, not on a GPU; leave out --device cuda", "its device is the host"
        )
    if "FLASHINFER" in backend.name:
        install_flashinfer()
    with device.watching():
        found = _find(backend, vllm.__version__)

    def make(device: Device) -> Any:
        stand_on(backend.capability, backend.name)
        cls = found.get_builder_cls() if hasattr(found, "get_builder_cls") else found
        return backend.make(cls, BuilderInputs(device.device, model))

    return Subject(
        backend.name,
        make,
        release_metadata(),
        f"vLLM {vllm.__version__}",
        backend.block_size,
        backend.fields,
        backend.arguments,
        not_for=backend.not_for,
        may_refuse=backend.may_refuse,
        remakes=backend.remakes,
        backend=found,
        layout=backend.layout,
        common_prefix=backend.common_prefix,
        device=HostDevice() if backend.on_host else None,
        layer=_layer_of(backend, found, device) if model is TINY else NOT_TINY,
        model=model.name,
    )


def _layer_of(backend: Backend, found: Any, device: Device) -> Callable[[Any, Device], Layer] | str:
    make = backend.layer
    if isinstance(make, str):
        return make
    source = loaded_source()
    if source is not None:
        return NO_KERNEL_RUNS if source.installed else NOTHING_COMPILED
    if not device.validates_kernels and not backend.on_host:
        return NO_KERNEL_RUNS
    return lambda builder, device: make(found, builder, device, backend.block_size)


def _find(backend: Backend, release: str) -> Any:
    for place in backend.places:
        module, _, name = place.partition(":")
        try:
            return getattr(importlib.import_module(module), name)
        except ModuleNotFoundError as error:
            if not is_absent(error, module):
                raise SubjectError(f"{backend.name} can't be imported here: {failure_sentence(error)}") from error
        except AttributeError:
            continue
        except Exception as error:
            raise SubjectError(f"{backend.name} can't be imported here: {failure_sentence(error)}") from error
    raise AbsentError(f"vLLM {release} has no {backend.name}")
