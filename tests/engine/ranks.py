"""One engine of several ranks, in processes as vLLM starts them: its tokens, and what each rank says, as JSON.

python tests/engine/ranks.py --target DIR --draft DIR --out FILE --options '{"tensor_parallel_size": 2}'
"""

import argparse
import json
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from rank_models import VOCABULARY

DIFFER = "RANKS_DIFFER"
"""A variable that makes rank 1 decide differently, on a CPU."""
REQUESTS = 12
DRAFT_TOKENS = 3
ASKED = "asked by a test"
"""Reason of the one fallback that each rank counts."""
PATIENCE_S = 10.0
"""Seconds for all ranks to publish their counts, at most."""


def ask_rank(worker: Any) -> dict[str, Any]:
    """What one rank says, after one host read that it counts. Runs in the worker's process."""
    from vllm_async_spec.sync_policy import record_fallback, sync_report
    from vllm_async_spec.vllm_plugin.state import active_plugin

    record_fallback("asked by a test")  # ASKED, which a worker can't import
    plugin = active_plugin()
    outcomes = plugin.ledger.outcomes if plugin is not None and plugin.ledger is not None else {}
    return {
        "rank": worker.rank,
        "pid": os.getpid(),
        "runner": type(worker.model_runner).__module__,
        "backends": sorted(
            {group.backend.get_name() for groups in worker.model_runner.attn_groups for group in groups}
        ),
        "asynchronous": bool(worker.vllm_config.scheduler_config.async_scheduling),
        "patches": {name: outcome.state.value for name, outcome in outcomes.items()},
        "report": sync_report().to_dict(),
    }


def differ() -> None:
    """Make the metadata builders of this process refuse CUDA graphs if it is rank 1."""
    import torch.distributed
    from vllm.config import get_current_vllm_config
    from vllm.v1.attention.backend import AttentionCGSupport
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder

    def get_cudagraph_support(cls: type[object], config: object, spec: object) -> AttentionCGSupport:
        get_current_vllm_config()  # as FlashInfer's builder does
        return AttentionCGSupport.NEVER if torch.distributed.get_rank() == 1 else AttentionCGSupport.ALWAYS

    CPUAttentionMetadataBuilder.get_cudagraph_support = classmethod(get_cudagraph_support)  # type: ignore[assignment]


def drafting(draft: str) -> dict[str, Any]:
    """The option of a `vllm.LLM` that drafts with this model."""
    return {"method": "draft_model", "model": draft, "num_speculative_tokens": DRAFT_TOKENS}


def engine(target: str, draft: str, options: dict[str, Any]) -> Any:
    """A `vllm.LLM` that drafts, with its metrics."""
    from vllm import LLM

    return LLM(
        target,
        skip_tokenizer_init=True,
        max_model_len=256,
        max_num_seqs=8,
        seed=0,
        disable_log_stats=False,
        **({"dtype": "float32", "speculative_config": drafting(draft)} | options),
    )


def serve(llm: Any, rows: Iterable[int]) -> dict[str, Any]:
    """The answers to these of the `REQUESTS`, and the drafts so far."""
    from vllm import SamplingParams

    prompts = [
        {"prompt_token_ids": [(7 * row * row + 31 * at) % VOCABULARY for at in range(5 + 9 * row)]} for row in rows
    ]
    params = [
        SamplingParams(temperature=0.0, max_tokens=6 + 5 * row, ignore_eos=True, detokenize=False, logprobs=2)
        for row in rows
    ]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    metrics = {metric.name: getattr(metric, "value", None) for metric in llm.get_metrics()}
    return {
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "margins": [margins(output.outputs[0].logprobs) for output in outputs],
        "drafts": metrics.get("vllm:spec_decode_num_draft_tokens"),
        "accepted": metrics.get("vllm:spec_decode_num_accepted_tokens"),
    }


def run(target: str, draft: str, options: dict[str, Any], requests: int = REQUESTS) -> dict[str, Any]:
    begun = time.monotonic()
    import vllm

    llm = engine(target, draft, options)
    start_s = time.monotonic() - begun
    answers = serve(llm, range(requests))
    ranks = llm.collective_rpc(ask_rank)
    snapshot = published(len(ranks))
    return answers | {
        "vllm": vllm.__version__,
        "start_s": round(start_s, 1),
        "ranks": ranks,
        "fallbacks": dict(snapshot.fallbacks),
        "engines": [[each.asynchronous, each.decided_by, each.runner] for each in snapshot.engines],
    }


def margins(listed: Any) -> list[float]:
    best = [sorted((entry.logprob for entry in position.values()), reverse=True)[:2] for position in listed]
    return [first - second for first, second in best]


def published(ranks: int) -> Any:
    """What the processes of this engine have published, once each rank's thread has written its count."""
    from vllm_async_spec.vllm_plugin.patches.prometheus_registry import publisher

    end = time.monotonic() + PATIENCE_S
    while True:
        snapshot = publisher.snapshot()
        if snapshot.fallbacks[ASKED] >= ranks or time.monotonic() > end:
            return snapshot
        time.sleep(0.1)


def main(run: Callable[[str, str, dict[str, Any]], dict[str, Any]], about: str | None) -> None:
    """The command line of a script that runs an engine: `run` takes target, draft model and options of vLLM's `LLM`."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--options", type=json.loads, default={}, help="of vLLM's LLM, as JSON")
    arguments = parser.parse_args()
    found = run(arguments.target, arguments.draft, arguments.options)
    arguments.out.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__mp_main__" and DIFFER in os.environ:
    differ()  # in the processes of the engine and its workers, which run this file again
if __name__ == "__main__":
    main(run, __doc__)
