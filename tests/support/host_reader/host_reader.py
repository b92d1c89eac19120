"""A vLLM plugin: the platform's own attention backend, with a builder that reads every host property in each build.

HOST_READER names the file for a line of JSON a build. HOST_READER_CONTROL=keep breaks `seq_lens_cpu` on purpose: it
keeps what it copied of a tensor.
"""

import torch

ON_GPU = torch.version.cuda is not None


def register() -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum["FLASH_ATTN" if ON_GPU else "CPU_ATTN"], "host_reader_backend.Backend")
