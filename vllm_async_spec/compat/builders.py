"""Objects of the loaded vLLM release, made the same way for every release.

Functions find differences between releases by looking for names, never by comparing versions. They import vLLM when
called, so that `load_vllm` can come first.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.backend import CommonAttentionMetadata
    from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadataBuilder


def common_metadata_class() -> type[CommonAttentionMetadata]:
    """Find the release's `CommonAttentionMetadata`.

    Raises:
        ImportError: The loaded release has the class in none of the known places.
    """
    found: type[CommonAttentionMetadata] = _find(
        "CommonAttentionMetadata", "vllm.v1.attention.backend", "vllm.v1.attention.backends.utils"
    )
    return found


def ubatch_function(name: str) -> Any:
    """Find a function of the release that splits metadata into micro-batches, such as `split_attn_metadata`.

    Raises:
        ImportError: The loaded release has the function in none of the known places.
    """
    return _find(name, "vllm.v1.worker.ubatch_utils", "vllm.v1.attention.backends.utils")


def common_metadata(
    query_lens: Sequence[int], seq_lens: Sequence[int], *, host: bool = False, block_size: int = 16, **extra: Any
) -> CommonAttentionMetadata:
    """Build the release's own common metadata of a batch, all on the CPU.

    Blocks are numbered from 1; requests share none. Tensors are int32, the slot mapping int64 as in vLLM.

    Args:
        query_lens: Tokens scheduled for each request.
        seq_lens: Length of each request including those tokens; exact.
        host: Also fill the host copies of lengths and computed tokens, exact, where the release has such fields.
            If False, these fields are None, even in 0.12, where an engine never leaves them None.
        block_size: Tokens in a block of the KV cache.
        **extra: Further fields; they override the fields made here.

    Returns:
        The metadata. `seq_lens_cpu_upper_bound`, where it exists, holds the exact lengths, as from the model runner.

    Raises:
        ImportError: The loaded release has `CommonAttentionMetadata` in none of the known places.
    """
    cls = common_metadata_class()
    exact = torch.tensor(seq_lens, dtype=torch.int32)
    query = torch.tensor(query_lens, dtype=torch.int32)
    starts = torch.zeros(len(query_lens) + 1, dtype=torch.int32)
    starts[1:] = query.cumsum(0)
    width = -(-max(seq_lens) // block_size)
    blocks = 1 + torch.arange(len(seq_lens) * width, dtype=torch.int32).view(-1, width)
    positions = [torch.arange(end - count, end) for count, end in zip(query_lens, seq_lens, strict=True)]
    slots = [row[at // block_size] * block_size + at % block_size for row, at in zip(blocks, positions, strict=True)]
    fields: dict[str, Any] = {
        "query_start_loc": starts,
        "query_start_loc_cpu": starts.clone(),
        "seq_lens": exact,
        "num_reqs": len(query_lens),
        "num_actual_tokens": sum(query_lens),
        "max_query_len": max(query_lens),
        "max_seq_len": max(seq_lens),
        "block_table_tensor": blocks,
        "slot_mapping": torch.cat(slots).long(),
    }
    known = {each.name for each in dataclasses.fields(cls)}
    if "seq_lens_cpu_upper_bound" in known:
        fields["seq_lens_cpu_upper_bound"] = exact.clone()
    copies = {"seq_lens_cpu": exact.clone(), "num_computed_tokens_cpu": exact - query}
    for name, copy in copies.items():
        fields |= {each: copy if host else None for each in (name, f"_{name}") if each in known}
    return cls(**fields | extra)


def write_llama(
    directory: Path,
    *,
    num_heads: int = 8,
    num_kv_heads: int = 2,
    head_size: int = 64,
    num_layers: int = 2,
    max_model_len: int = 2048,
    architecture: str = "LlamaForCausalLM",
) -> Path:
    """Write the configuration of a tiny Llama, without weights or tokenizer, as `config.json` in `directory`.

    The architecture is the class that vLLM should see; `EagleLlamaForCausalLM` makes it a draft head.
    """
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": [architecture],
        "model_type": "llama",
        "hidden_size": num_heads * head_size,
        "intermediate_size": 64,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_size,
        "num_hidden_layers": num_layers,
        "vocab_size": 128,
        "max_position_embeddings": max_model_len,
        "torch_dtype": "bfloat16",
    }
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    return directory


def engine_config(model: Path, **engine_args: Any) -> VllmConfig:
    """Make the release's configuration of a model of `write_llama`, as an engine does at start-up."""
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(model=str(model), skip_tokenizer_init=True, **engine_args).create_engine_config()


def llama_config(engine_args: Mapping[str, Any], **shape: Any) -> VllmConfig:
    """Make the release's configuration of a tiny Llama: arguments of `engine_config`, shape of `write_llama`."""
    with tempfile.TemporaryDirectory() as scratch:
        return engine_config(write_llama(Path(scratch), **shape), **engine_args)


def ngram_drafts(count: int) -> dict[str, Any] | None:
    """The n-gram `speculative_config` of `count` drafts a step, which needs no draft model; None for no drafts."""
    return {"method": "ngram", "num_speculative_tokens": count, "prompt_lookup_max": 2} if count else None


def flash_attention_builder(*, spec_tokens: int = 0) -> FlashAttentionMetadataBuilder:
    """Build the release's FlashAttention metadata builder (FA3, full CUDA graphs) on the CPU.

    Its configuration is a real one. Each step has `spec_tokens` drafts; 0 is no speculation.
    """
    from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadataBuilder

    return FlashAttentionMetadataBuilder(*_arguments(block_size=16, spec_tokens=spec_tokens))


@contextlib.contextmanager
def flashinfer_setting(
    *, block_size: int, spec_tokens: int, max_model_len: int = 2048, trtllm: bool | None
) -> Iterator[tuple[Any, ...]]:
    """Yield the arguments of the release's FlashInfer metadata builder, while their configuration is vLLM's current.

    Each step has `spec_tokens` drafts. `trtllm` is `attention_config.use_trtllm_attention`; False excludes both XQA and
    trtllm-gen.
    """
    from vllm.config import set_current_vllm_config

    arguments = _arguments(block_size=block_size, spec_tokens=spec_tokens, max_model_len=max_model_len)
    config = arguments[2]
    config.attention_config.use_trtllm_attention = trtllm
    with set_current_vllm_config(config):
        yield arguments


def _arguments(
    *, block_size: int, spec_tokens: int, max_model_len: int = 2048
) -> tuple[Any, list[str], VllmConfig, torch.device]:
    """The arguments of every metadata builder: KV-cache spec, layer names, configuration, device (the CPU)."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    shape = {"num_kv_heads": 2, "head_size": 64}
    engine_args = {"block_size": block_size, "speculative_config": ngram_drafts(spec_tokens)}
    config = llama_config(engine_args, **shape, max_model_len=max_model_len)
    spec = FullAttentionSpec(block_size=block_size, dtype=torch.bfloat16, **shape)
    return spec, ["model.layers.0.self_attn.attn"], config, torch.device("cpu")


def _find(name: str, *modules: str) -> Any:
    for module in modules:
        try:
            return getattr(importlib.import_module(module), name)
        except AttributeError:
            continue
        except ModuleNotFoundError as error:
            if not is_absent(error, module):
                raise
    raise ImportError(f"the loaded vLLM has no {name} in {' or '.join(modules)}")


def is_absent(error: ModuleNotFoundError, module: str) -> bool:
    """Whether `module`, a full name, or a package around it is missing, and not something that it imports."""
    return error.name is not None and f"{module}.".startswith(f"{error.name}.")
