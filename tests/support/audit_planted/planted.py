"""A vLLM plugin that puts `planted_backend.Backend` in the place of the platform's own attention backend."""

import torch

ON_GPU = torch.version.cuda is not None


def register() -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum["FLASH_ATTN" if ON_GPU else "CPU_ATTN"], "planted_backend.Backend")
