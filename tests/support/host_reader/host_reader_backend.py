"""The backend that `host_reader` registers."""

import json
import os
from pathlib import Path
from typing import Any

import torch
from host_reader import ON_GPU
from vllm.v1.attention.backend import CommonAttentionMetadata

if ON_GPU:
    from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend as Base
else:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend as Base

OUT = Path(os.environ["HOST_READER"])

_kept: dict[tuple[int, int], torch.Tensor] = {}


def keep(metadata: Any) -> torch.Tensor:
    lengths = metadata.seq_lens
    return _kept.setdefault((lengths.data_ptr(), lengths.numel()), lengths.to("cpu", copy=True))


if os.environ.get("HOST_READER_CONTROL") == "keep":
    CommonAttentionMetadata.seq_lens_cpu = property(keep, lambda self, value: None)


def stale(metadata: Any) -> list[str]:
    lengths = metadata.seq_lens.to("cpu", copy=True)
    computed = (metadata.seq_lens - metadata.query_start_loc.diff()).to("cpu", copy=True)
    exact = {"seq_lens_cpu": lengths, "num_computed_tokens_cpu": computed}
    return [name for name, value in exact.items() if getattr(metadata, name).tolist() != value.tolist()]


class Builder(Base.get_builder_cls()):  # type: ignore[misc]
    def build(self, common_prefix_len: int, common_attn_metadata: Any, *args: Any, **kwargs: Any) -> Any:
        if not (ON_GPU and torch.cuda.is_current_stream_capturing()):
            with OUT.open("a", encoding="utf-8") as out:
                row = {"tokens": int(common_attn_metadata.max_query_len), "stale": stale(common_attn_metadata)}
                out.write(json.dumps(row) + "\n")
        return super().build(common_prefix_len, common_attn_metadata, *args, **kwargs)


class Backend(Base):
    @staticmethod
    def get_builder_cls() -> type:
        return Builder
