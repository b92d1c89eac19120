"""One engine of data parallelism, with the workers that vLLM starts for it: its tokens, and its agreements, as JSON.

python tests/engine/engines.py --number 0 --engines 2 --port 29500 --target DIR --draft DIR --out FILE

vLLM's CPU platform lacks the two collectives by which engines exchange tokens of experts. Here gloo lends them.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rank_models import VOCABULARY
from ranks import DRAFT_TOKENS, REQUESTS, margins

AGREEMENTS = "agreements_counted"
"""Attribute of vLLM's module: agreements of this process so far."""


def all_gatherv(
    self: Any, given: torch.Tensor | Sequence[torch.Tensor], dim: int = 0, sizes: list[int] | None = None
) -> torch.Tensor | list[torch.Tensor]:
    """Rows of all ranks, of which each may have another number; of several tensors, a list."""
    if not isinstance(given, torch.Tensor):
        return [all_gatherv(self, each, dim, sizes) for each in given]  # type: ignore[misc]
    sizes = sizes or [len(given)] * self.world_size
    mine = given.new_zeros(max(sizes), *given.shape[1:])
    mine[: len(given)] = given
    found = [torch.empty_like(mine) for _ in sizes]
    torch.distributed.all_gather(found, mine, group=self.cpu_group)
    return torch.cat([each[:size] for each, size in zip(found, sizes, strict=True)])


def reduce_scatterv(self: Any, given: torch.Tensor, dim: int = 0, sizes: list[int] | None = None) -> torch.Tensor:
    """The sum over all ranks, of which this one keeps its own rows."""
    whole = given.clone()
    torch.distributed.all_reduce(whole, group=self.cpu_group)
    sizes = sizes or [len(given) // self.world_size] * self.world_size
    return whole.split(sizes)[self.rank_in_group].contiguous()


def lend() -> None:
    """Give vLLM's CPU platform the collectives, and count agreements; in every process of the engine."""
    from vllm.v1.worker import dp_utils

    if not torch.cuda.is_available():
        from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

        CpuCommunicator.all_gatherv, CpuCommunicator.reduce_scatterv = all_gatherv, reduce_scatterv
    meet = dp_utils._run_ar

    def counted(*args: Any, **kwargs: Any) -> torch.Tensor:
        setattr(dp_utils, AGREEMENTS, getattr(dp_utils, AGREEMENTS, 0) + 1)
        return meet(*args, **kwargs)

    dp_utils._run_ar = counted


def agreements(worker: Any) -> int:
    """The agreements of a worker's process so far. Runs there."""
    from vllm.v1.worker import dp_utils

    return getattr(dp_utils, "agreements_counted", 0)  # AGREEMENTS, which a worker can't import


def run(number: int, engines: int, target: str, draft: str, options: dict[str, Any]) -> dict[str, Any]:
    """Serve every `engines`-th request, from `number` on."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        target,
        skip_tokenizer_init=True,
        max_model_len=256,
        max_num_seqs=8,
        seed=0,
        disable_log_stats=False,
        speculative_config={"method": "draft_model", "model": draft, "num_speculative_tokens": DRAFT_TOKENS},
        **({"dtype": "float32", "enforce_eager": True} | options),
    )
    rows = range(number, REQUESTS, engines)
    prompts: Any = [
        {"prompt_token_ids": [(7 * row * row + 31 * at) % VOCABULARY for at in range(5 + 9 * row)]} for row in rows
    ]
    params = [
        SamplingParams(temperature=0.0, max_tokens=6 + 5 * row, ignore_eos=True, detokenize=False, logprobs=2)
        for row in rows
    ]
    before = llm.collective_rpc(agreements)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    metrics = {metric.name: getattr(metric, "value", None) for metric in llm.get_metrics()}
    return {
        "rows": list(rows),
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "margins": [margins(output.outputs[0].logprobs) for output in outputs],
        "accepted": metrics.get("vllm:spec_decode_num_accepted_tokens"),
        "drafts": metrics.get("vllm:spec_decode_num_draft_tokens"),
        "agreements": [after - ago for after, ago in zip(llm.collective_rpc(agreements), before, strict=True)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, required=True, help="of this engine, from 0 on")
    parser.add_argument("--engines", type=int, required=True)
    parser.add_argument("--port", required=True, help="at which the engines meet")
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--options", type=json.loads, default={}, help="of vLLM's LLM, as JSON")
    given = parser.parse_args()
    if given.engines > 1:
        number = str(given.number)
        os.environ |= {"VLLM_DP_RANK": number, "VLLM_DP_RANK_LOCAL": number, "VLLM_DP_SIZE": str(given.engines)}
        os.environ |= {"VLLM_DP_MASTER_IP": "127.0.0.1", "VLLM_DP_MASTER_PORT": given.port}
    found = run(given.number, given.engines, given.target, given.draft, given.options)
    given.out.write_text(json.dumps(found), encoding="utf-8")


if __name__ in ("__main__", "__mp_main__"):  # the processes of the engine and its workers run this file again
    lend()
if __name__ == "__main__":
    main()
