from dataclasses import replace

import torch

from vllm_async_spec.attention import FlashInferFeatures, TrtllmShape

PAGE = 16
NEW = FlashInferFeatures(ragged_xqa=True, large_pages=True)
OLD = FlashInferFeatures(ragged_xqa=False, large_pages=False)
SM100 = TrtllmShape(
    kernel="trtllm-gen",
    capability=(10, 0),
    page_size=PAGE,
    head_size=128,
    num_heads=32,
    num_kv_heads=8,
    query_dtype=torch.bfloat16,
    kv_dtype=torch.bfloat16,
    query_tokens=4,
    features=NEW,
)
SM90 = replace(SM100, kernel="xqa", capability=(9, 0))
