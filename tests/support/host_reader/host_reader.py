"""A vLLM plugin: the platform's own attention backend, with a builder that reads every host property in each build.

HOST_READER names the file that gets a line of JSON for each build. HOST_READER_CONTROL=keep breaks `seq_lens_cpu` on
purpose: it keeps what it copied of a tensor, since V2 makes new metadata of the same tensor for each build.
"""

import torch

ON_GPU = torch.version.cuda is not None


def register() -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum["FLASH_ATTN" if ON_GPU else "CPU_ATTN"], "host_reader_backend.Backend")
