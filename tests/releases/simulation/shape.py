"""The size of an engine, and the release's configuration, KV cache and process groups for it."""

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from simulation.model import WINDOW
from vllm_async_spec.compat import builders

BLOCK = 8
LONGEST = 96
LAYERS = ("target.full", "target.window")
DRAFT_LAYER = "draft.full"


@dataclass(frozen=True, slots=True)
class Shape:
    """The size of an engine: drafts of a step, rows and tokens of a batch, blocks that the KV cache groups share.

    `kept`: tokens that the scheduler keeps of a window beyond those that the model sees; it frees blocks by lengths in
    which drafts in flight count. `long_drafter`: a drafter that never stops for the length, where bounds would stop it
    early. `axes`: M-RoPE's three axes, which are alike for a text. `states`: the second KV cache group is of linear
    attention, and keeps a state for each draft; see `hybrid`.
    """

    drafts: int = 3
    rows: int = 5
    tokens: int = 32
    blocks: int = 80
    prefix_caching: bool = False
    kept: int = 12
    long_drafter: bool = True
    axes: bool = False
    states: bool = False


def configuration(shape: Shape) -> Any:
    sizes = {"num_heads": 1, "num_kv_heads": 1, "head_size": 8, "max_model_len": LONGEST}
    with tempfile.TemporaryDirectory() as scratch:
        model = builders.write_llama(Path(scratch) / "target", **sizes)
        draft = builders.write_llama(
            Path(scratch) / "draft", num_layers=1, architecture="EagleLlamaForCausalLM", **sizes
        )
        config = builders.engine_config(
            model,
            block_size=16,
            max_num_seqs=shape.rows,
            max_num_batched_tokens=shape.tokens,
            max_model_len=LONGEST,
            enforce_eager=True,
            async_scheduling=True,
            enable_prefix_caching=shape.prefix_caching,
            disable_cascade_attn=True,
            speculative_config={
                "method": "eagle",
                "model": str(draft),
                "num_speculative_tokens": shape.drafts,
            },
        )
    config.cache_config.block_size = BLOCK
    config.cache_config.num_gpu_blocks = shape.blocks
    return config


def kv_cache(shape: Shape) -> Any:
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        MambaSpec,
        SlidingWindowSpec,
    )

    sizes = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 8, "dtype": torch.bfloat16}
    second: Any = SlidingWindowSpec(**sizes, sliding_window=WINDOW + shape.kept)
    if shape.states:
        kinds = {"shapes": ((3, 24), (4, 8, 8)), "dtypes": (torch.bfloat16,) * 2}
        second = MambaSpec(block_size=LONGEST, num_speculative_blocks=shape.drafts, **kinds)
    groups = [
        KVCacheGroupSpec([LAYERS[0], DRAFT_LAYER], FullAttentionSpec(**sizes)),
        KVCacheGroupSpec([LAYERS[1]], second),
    ]
    return KVCacheConfig(num_blocks=shape.blocks, kv_cache_tensors=[], kv_cache_groups=groups)


@contextlib.contextmanager
def one_process() -> Iterator[None]:
    from vllm.distributed import parallel_state

    group = SimpleNamespace(
        world_size=1,
        rank=0,
        rank_in_group=0,
        ranks=[0],
        is_first_rank=True,
        is_last_rank=True,
        first_rank=0,
        last_rank=0,
    )
    with contextlib.ExitStack() as stack:
        for name in ("_WORLD", "_TP", "_PP", "_DP", "_DCP", "_PCP", "_EP"):
            if hasattr(parallel_state, name):
                stack.enter_context(mock.patch.object(parallel_state, name, group))
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield
