"""vLLM's own metadata builders by name, and how each is made without a model, for any release that has it."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from vllm_async_spec.compat import flashinfer_stub
from vllm_async_spec.compat.builder_inputs import BuilderInputs
from vllm_async_spec.compat.cases import BLOCK_SIZE, DRAFT_TOKENS, NUM_BLOCKS, Call, Case, release_metadata
from vllm_async_spec.compat.check import AbsentError, Subject, SubjectError, failure_sentence
from vllm_async_spec.compat.device import Device
from vllm_async_spec.compat.flashinfer_builders import PAGE_TABLE, Way, flashinfer_builder
from vllm_async_spec.compat.host_device import HostDevice
from vllm_async_spec.compat.impl_layer import ImplLayer
from vllm_async_spec.compat.layer import NOTHING_COMPILED, Layer
from vllm_async_spec.compat.local_attention import local_attention_builder
from vllm_async_spec.compat.machine import BLACKWELL, context_parallel, stand_on
from vllm_async_spec.compat.mla import indexer_builder, mla_builder, mla_prefill_builder, sparse_mla_builder
from vllm_async_spec.compat.mla_layer import MlaLayer
from vllm_async_spec.compat.vllm_source import loaded_source
from vllm_async_spec.patching import temporarily

__all__ = ["BACKENDS", "Backend", "backend_subject"]

_IN = "vllm.v1.attention.backends."
_LAYERS = ("vllm.model_executor.layers.attention.", "vllm.attention.layers.")
"""Where attention layers live, in newer releases and in older ones."""
_LOCAL_CHUNK = 64
"""Tokens that a token of chunked local attention sees at most."""


MakeLayer = Callable[[Any, Any, Device, int], Layer]
"""From what was found, a builder, the device, and the tokens in a block of the KV cache."""


def _layer(**how: Any) -> MakeLayer:
    return lambda found, builder, device, block_size: ImplLayer(found, builder, device, block_size, **how)


def _triton_layer(**how: Any) -> MakeLayer:
    """As `_layer`, where what was found makes a backend of another."""
    return lambda found, builder, device, block_size: ImplLayer(_triton(), builder, device, block_size, **how)


def _triton() -> Any:
    return importlib.import_module(f"{_IN}triton_attn").TritonAttentionBackend


def _mla_layer(found: Any, builder: Any, device: Device, block_size: int) -> Layer:
    return MlaLayer(found, builder, device, block_size)


_LAYER = _layer()


@dataclass(frozen=True, slots=True)
class Backend:
    """One builder of vLLM's.

    Attributes:
        name: What the tables call it; as vLLM spells the backend, where it has one name.
        places: `module:name` of a backend class, or of what `make` wants, in one release or another; the first that
            exists is taken.
        make: Makes the builder from its class, or from what was found, and a setting.
        block_size: Tokens in a block of its KV cache.
        fields: Further fields of the common metadata.
        arguments: Further arguments of `build`, of which the builder is given those that it takes.
        layout: As `Subject.layout`.
        not_for: As `Subject.not_for`.
        common_prefix: As `Subject.common_prefix`.
        capability: The compute capability of the GPU that it is for; None for an H200's, or any.
        on_host: Whether its device is the host.
        layer: Makes a layer that attends with what the builder has built; or why there is none.
    """

    name: str
    places: tuple[str, ...]
    make: Callable[[Any, BuilderInputs], Any]
    block_size: int = BLOCK_SIZE
    fields: Callable[[Case, Device], Mapping[str, Any]] = lambda case, device: {}
    arguments: Callable[[Case, Device], Mapping[str, Any]] = lambda case, device: {}
    layout: tuple[str, ...] = ()
    not_for: Callable[[Case], str | None] = lambda case: None
    common_prefix: Callable[[Case], int] = lambda case: 0
    capability: tuple[int, int] | None = None
    on_host: bool = False
    layer: MakeLayer | str = _LAYER


def _plain(cls: Any, setting: BuilderInputs) -> Any:
    return setting.construct(cls, *setting.arguments())


def _flex(cls: Any, setting: BuilderInputs) -> Any:
    arguments = setting.arguments()
    arguments[2].cache_config.num_gpu_blocks = NUM_BLOCKS
    return setting.construct(cls, *arguments)


def _mamba(cls: Any, setting: BuilderInputs) -> Any:
    from vllm.v1.kv_cache_interface import MambaSpec

    # As for a model of such layers only: no prefix caching, and one block for a request and each of its drafts.
    _, layers, config, device = setting.arguments(enable_prefix_caching=False)
    spec = MambaSpec(
        block_size=BLOCK_SIZE,
        shapes=((4, 4), (4, 4, 4)),
        dtypes=(torch.bfloat16, torch.bfloat16),
        num_speculative_blocks=DRAFT_TOKENS,
    )
    return setting.construct(cls, spec, layers, config, device)


def _accepted(case: Case, device: Device) -> Mapping[str, Any]:
    """What vLLM's runner gives builders of state-space layers: accepted tokens, and drafts, -1 where there are none."""
    drafts = [
        query - 1 if query > 1 and not prefilling else -1
        for query, prefilling in zip(case.query_lens, case.prefilling, strict=True)
    ]
    accepted = [max(1, query - row % 3) for row, query in enumerate(case.query_lens)]
    return {
        "num_accepted_tokens": device.place(torch.tensor(accepted, dtype=torch.int32)),
        "num_decode_draft_tokens_cpu": torch.tensor(drafts, dtype=torch.int32),
    }


def _mla(block_size: int) -> Callable[[Any, BuilderInputs], Any]:
    return lambda cls, setting: mla_builder(cls, setting, block_size)


def _mla_prefill(kernels: str) -> Callable[[Any, BuilderInputs], Any]:
    return lambda cls, setting: mla_prefill_builder(setting, kernels, BLOCK_SIZE)


def _sparse(cache_dtype: str) -> Callable[[Any, BuilderInputs], Any]:
    return lambda cls, setting: sparse_mla_builder(cls, setting, cache_dtype)


@contextlib.contextmanager
def _before_hopper() -> Iterator[None]:
    """As on such a GPU: FA3 is what a release finds on an H200."""
    with temporarily() as changes:
        module = importlib.import_module(f"{_IN}flash_attn")
        changes.set(module, "get_flash_attn_version", lambda *args, **kwargs: 2)
        yield


def _flash_attention_2(cls: Any, setting: BuilderInputs) -> Any:
    arguments = setting.arguments()
    with _before_hopper():
        return setting.construct(cls, *arguments)


def _flash_attention_dcp(cls: Any, setting: BuilderInputs) -> Any:
    arguments = setting.arguments()
    with context_parallel(arguments[2], 2):
        return setting.construct(cls, *arguments)


def _flash_attention_cascade(cls: Any, setting: BuilderInputs) -> Any:
    if not hasattr(importlib.import_module(cls.__module__), "cascade_attention"):
        raise AbsentError("this release has no cascade attention")
    return _plain(cls, setting)


def _shared_prefix(case: Case) -> int:
    """Whole blocks that all requests had computed before, as vLLM counts what they share."""
    computed = [seq - query for seq, query in zip(case.seq_lens, case.query_lens, strict=True) if seq]
    return min(computed) // BLOCK_SIZE * BLOCK_SIZE


def _shares_nothing(case: Case) -> str | None:
    if case.call is not Call.BUILD:
        return "only a step of the target model is told of a common prefix"
    return None if _shared_prefix(case) else "its requests share no full block"


def _cpu(cls: Any, setting: BuilderInputs) -> Any:
    """The kernel that schedules it is compiled; where nothing is, its arguments are recorded."""
    source = loaded_source()
    if source is not None:
        module: Any = importlib.import_module(cls.__module__)

        def scheduled(**given: Any) -> torch.Tensor:
            result = torch.zeros(1, dtype=torch.int32)
            source.kernel("cpu_attn_get_scheduler_metadata", given, result)
            return result

        source.stands_in("vllm._custom_ops:cpu_attn_get_scheduler_metadata")
        module.ops.cpu_attn_get_scheduler_metadata = scheduled
    return _plain(cls, setting)


def _encoder_only(found: Any, setting: BuilderInputs) -> Any:
    from vllm.v1.kv_cache_interface import EncoderOnlyAttentionSpec

    _, layers, config, device = setting.arguments()
    spec = EncoderOnlyAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
    return setting.construct(found(_triton()).get_builder_cls(), spec, layers, config, device)


def _no_encoder_batch(case: Case) -> str | None:
    whole = case.query_lens == case.seq_lens and case.call is Call.BUILD
    return None if whole else "an encoder is given whole prompts only"


def _chunked_local(found: Any, setting: BuilderInputs) -> Any:
    return local_attention_builder(_triton(), setting, _LOCAL_CHUNK, BLOCK_SIZE)


def _fast_prefill(found: Any, setting: BuilderInputs) -> Any:
    return _plain(found("FastPrefill", _triton()).get_builder_cls(), setting)


def _logits(case: Case, device: Device) -> Mapping[str, Any]:
    """The last token of each request, padded, as KV-sharing fast prefill is given them."""
    ends = torch.tensor(case.query_lens).cumsum(0)[: case.live] - 1
    indices: Any = device.place(ends.to(torch.int32))
    # As the plugin's patches of vLLM's runners note it; nothing of stock vLLM looks at it.
    indices.tokens_per_request = np.ones(case.live, dtype=np.int32)
    return {
        "logits_indices_padded": indices,
        "num_logits_indices": case.live,
        "max_logits_per_req": 1,
    }


def _encoder(case: Case, device: Device) -> Mapping[str, Any]:
    """Encoder outputs of 40 tokens for each request."""
    lengths = torch.tensor([40 * (length > 0) for length in case.seq_lens], dtype=torch.int32)
    return {"encoder_seq_lens": device.place(lengths.clone()), "encoder_seq_lens_cpu": lengths.numpy()}


def _cross(found: Any, setting: BuilderInputs) -> Any:
    from vllm.v1.kv_cache_interface import CrossAttentionSpec

    _, layers, config, device = setting.arguments()
    spec = CrossAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
    return setting.construct(found(_triton()).get_builder_cls(), spec, layers, config, device)


def _flashinfer(way: Way) -> Callable[[Any, BuilderInputs], Any]:
    return lambda cls, setting: flashinfer_builder(cls, setting, way)


_FLASHINFER = f"{_IN}flashinfer:FlashInferBackend"
_FLASH = f"{_IN}flash_attn:FlashAttentionBackend"
_FLASHMLA_SPARSE = f"{_IN}mla.flashmla_sparse:FlashMLASparseBackend"
_TRITON_MLA = f"{_IN}mla.triton_mla:TritonMLABackend"
_TRITON = f"{_IN}triton_attn:TritonAttentionBackend"
_TILES = (".scheduler_metadata",)
"""How FlashAttention's kernels share the work out, which its planner sizes by the longest. Lengths are beside it."""
_TWO_RANKS = "its ranks talk to each other while they attend, and here is one"
_CHOSEN = "it attends to what an indexer chose, and the suite has none that chooses"
_STATES = "a layer of state space attends to nothing"

BACKENDS: dict[str, Backend] = {
    backend.name: backend
    for backend in (
        Backend("FLASH_ATTN", (_FLASH,), _plain, layout=_TILES),
        Backend("FLASH_ATTN_FA2", (_FLASH,), _flash_attention_2, layout=_TILES, layer=_layer(surround=_before_hopper)),
        Backend("FLASH_ATTN_DCP", (_FLASH,), _flash_attention_dcp, layout=_TILES, layer=_TWO_RANKS),
        Backend(
            "FLASH_ATTN_CASCADE",
            (_FLASH,),
            _flash_attention_cascade,
            layout=_TILES,
            not_for=_shares_nothing,
            common_prefix=_shared_prefix,
        ),
        Backend("TRITON_ATTN", (_TRITON,), _plain),
        Backend("FLEX_ATTENTION", (f"{_IN}flex_attention:FlexAttentionBackend",), _flex),
        Backend("TREE_ATTN", (f"{_IN}tree_attn:TreeAttentionBackend",), _plain),
        Backend(
            "TURBOQUANT",
            (f"{_IN}turboquant_attn:TurboQuantAttentionBackend",),
            _plain,
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
        Backend("FLASHMLA_SPARSE_FP8", (_FLASHMLA_SPARSE,), _sparse("fp8_ds_mla"), block_size=64, layer=_CHOSEN),
        Backend("FLASHINFER", (_FLASHINFER,), _flashinfer(Way.NATIVE), layout=PAGE_TABLE),
        Backend("FLASHINFER_XQA", (_FLASHINFER,), _flashinfer(Way.XQA), layout=PAGE_TABLE),
        Backend("FLASHINFER_TRTLLM", (_FLASHINFER,), _flashinfer(Way.TRTLLM), layout=PAGE_TABLE, capability=BLACKWELL),
        Backend(
            "FLASHINFER_DCP", (_FLASHINFER,), _flashinfer(Way.CONTEXT_PARALLEL), layout=PAGE_TABLE, layer=_TWO_RANKS
        ),
        Backend("MAMBA1", (f"{_IN}mamba1_attn:Mamba1AttentionBackend",), _mamba, arguments=_accepted, layer=_STATES),
        Backend("MAMBA2", (f"{_IN}mamba2_attn:Mamba2AttentionBackend",), _mamba, arguments=_accepted, layer=_STATES),
        Backend("GDN", (f"{_IN}gdn_attn:GDNAttentionBackend",), _mamba, arguments=_accepted, layer=_STATES),
        Backend("LINEAR", (f"{_IN}linear_attn:LinearAttentionBackend",), _mamba, arguments=_accepted, layer=_STATES),
        Backend(
            "SHORT_CONV",
            (f"{_IN}short_conv_attn:ShortConvAttentionBackend",),
            _mamba,
            arguments=_accepted,
            layer=_STATES,
        ),
        Backend(
            "CHUNKED_LOCAL",
            tuple(f"{layers}chunked_local_attention:create_chunked_local_attention_backend" for layers in _LAYERS),
            _chunked_local,
            layer=_triton_layer(chunk=_LOCAL_CHUNK),
        ),
        Backend(
            "FAST_PREFILL",
            (f"{_IN}utils:create_fast_prefill_custom_backend",),
            _fast_prefill,
            fields=_logits,
            layer=_triton_layer(last_only=True),
        ),
        Backend(
            "CROSS_ATTENTION",
            tuple(f"{layers}cross_attention:create_cross_attention_backend" for layers in _LAYERS),
            _cross,
            fields=_encoder,
            layer="it attends to what an encoder made, and the suite has no encoder",
        ),
        Backend(
            "ENCODER_ONLY",
            tuple(f"{layers}encoder_only_attention:create_encoder_only_attention_backend" for layers in _LAYERS),
            _encoder_only,
            not_for=_no_encoder_batch,
            layer=_triton_layer(encoder=True),
        ),
        # Its plan is bytes, not all of which its kernel writes.
        Backend(
            "CPU_ATTN", (f"{_IN}cpu_attn:CPUAttentionBackend",), _cpu, layout=("scheduler_metadata",), on_host=True
        ),
    )
}
"""All, in the order of the tables."""


def backend_subject(name: str, device: Device) -> Subject:
    """The builder of vLLM's that `name` names, in the vLLM that is imported here.

    Args:
        name: A key of `BACKENDS`, in any case.
        device: Where it will be made; some modules take device memory when they are imported.

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
    if backend.on_host and device.device.type != "cpu":
        raise AbsentError(f"the device of {backend.name} is the host", "its device is the host")
    if "FLASHINFER" in backend.name:
        flashinfer_stub.install()
    with device.watching():
        found = _find(backend, vllm.__version__)

    def make(device: Device) -> Any:
        stand_on(backend.capability, backend.name)
        cls = found.get_builder_cls() if hasattr(found, "get_builder_cls") else found
        return backend.make(cls, BuilderInputs(device.device))

    return Subject(
        backend.name,
        make,
        release_metadata(),
        f"vLLM {vllm.__version__}",
        backend.block_size,
        backend.fields,
        backend.arguments,
        not_for=backend.not_for,
        layout=backend.layout,
        common_prefix=backend.common_prefix,
        device=HostDevice() if backend.on_host else None,
        layer=_layer_of(backend, found, device),
    )


def _layer_of(backend: Backend, found: Any, device: Device) -> Callable[[Any, Device], Layer] | str:
    make = backend.layer
    if isinstance(make, str):
        return make
    if loaded_source() is not None:
        return NOTHING_COMPILED
    if not device.validates_kernels and not backend.on_host:
        return "no kernel runs on a simulated device"
    return lambda builder, device: make(found, builder, device, backend.block_size)


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
