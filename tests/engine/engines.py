"""One engine of data parallelism, with the workers that vLLM starts for it: its tokens, and its agreements, as JSON.

VLLM_DP_RANK=0 VLLM_DP_SIZE=2 ... python tests/engine/engines.py --target DIR --draft DIR --out FILE

vLLM's variables for data parallelism say which engine this is, and where the engines meet. vLLM's CPU platform lacks
the two collectives by which they exchange tokens of experts. Here gloo lends them.
"""

import os
from collections.abc import Sequence
from typing import Any

import torch
from ranks import REQUESTS, engine, main, serve


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
    dp_utils.agreements = 0

    def counted(*args: Any, **kwargs: Any) -> torch.Tensor:
        dp_utils.agreements += 1
        return meet(*args, **kwargs)

    dp_utils._run_ar = counted


def agreements(worker: Any) -> int:
    """The agreements of a worker's process so far. Runs there."""
    from vllm.v1.worker import dp_utils

    return int(dp_utils.agreements)


def run(target: str, draft: str, options: dict[str, Any]) -> dict[str, Any]:
    """Serve this engine's requests: of several engines, one request in turn for each."""
    rows = range(int(os.environ.get("VLLM_DP_RANK", "0")), REQUESTS, int(os.environ.get("VLLM_DP_SIZE", "1")))
    llm = engine(target, draft, options)
    before = llm.collective_rpc(agreements)
    answers = serve(llm, rows)
    after = llm.collective_rpc(agreements)
    return answers | {"rows": list(rows), "agreements": [now - ago for now, ago in zip(after, before, strict=True)]}


if __name__ in ("__main__", "__mp_main__"):  # the processes of the engine and its workers run this file again
    lend()
if __name__ == "__main__":
    main(run, __doc__)
