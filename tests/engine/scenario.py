"""Scenarios on real vLLM engines, run in a process of their own: one JSON line for each into a file.

    python tests/engine/scenario.py --mode plugin --target DIR --draft DIR --out FILE --scenario abort --scenario queue

Scenarios of the same engine share it, and engines come one after another, because importing vLLM takes longer than
starting one. The engine is in this process, so that what it really runs with can be looked at.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from catalogue import ENGINES, MAX_MODEL_LEN, SCENARIOS, Engine
from results import Completion, Mode, Result

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput


def environment(mode: Mode | None = None) -> dict[str, str]:
    """For a process of this mode: what is set for this one, but nothing of it for vLLM."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
    common = {
        "HF_HUB_OFFLINE": "1",
        # Matrices this small have no work for two, and the modes run side by side; Numba's threads are the n-grams'.
        "OMP_NUM_THREADS": "1",
        "NUMBA_NUM_THREADS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
    }
    stock = {} if mode is Mode.PLUGIN else {"VLLM_ASYNC_SPEC": "off"}
    return inherited | common | stock | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


def start(engine: Engine, mode: Mode, target: Path, draft: Path) -> LLM:
    """An engine that is what the mode says."""
    from vllm import LLM

    drafting = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": engine.draft_tokens}
    options: dict[str, Any] = {"speculative_config": drafting} | engine.options
    if mode is not Mode.PLUGIN:  # the plugin's user says nothing about it
        options["async_scheduling"] = mode is Mode.ASYNC
    llm = LLM(
        str(target),
        dtype="float32",
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=16,
        enforce_eager=True,
        disable_log_stats=False,
        seed=0,
        # Of whitespace, where JSON allows it, this model would write nothing else.
        structured_outputs_config={"backend": "xgrammar", "disable_any_whitespace": True},
        **options,
    )
    core = llm.llm_engine.engine_core.engine_core
    asynchronous = engine.asynchronous and mode is not Mode.SYNC
    found = type(core.scheduler).__name__, core.batch_queue_size
    assert found == (("AsyncScheduler", 2) if asynchronous else ("Scheduler", 1)), f"{mode.value}: {found}"
    return llm


def results(names: Sequence[str], mode: Mode, target: Path, draft: Path) -> Iterator[Result]:
    """Run scenarios, each engine only once and nothing left of it when the next one starts."""
    import vllm.v1.worker.cpu_model_runner  # noqa: F401  # the largest part of what an engine imports later
    from vllm.distributed import cleanup_dist_env_and_memory

    # vLLM collects garbage ten times an engine, and each time all that it has imported is looked through, but for what
    # is frozen. It would thaw that at the end of an engine.
    freeze, gc.freeze, gc.unfreeze = gc.freeze, lambda: None, lambda: None
    for engine in dict.fromkeys(SCENARIOS[name].engine for name in names):
        freeze()
        llm = start(ENGINES[engine], mode, target, draft)
        for name in names:
            if SCENARIOS[name].engine == engine:
                yield measure(name, llm)
        # An engine that dies late takes the process groups of the next one with it.
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()


def measure(name: str, llm: LLM) -> Result:
    from vllm.exceptions import VLLMValidationError

    before = counters(llm)
    outputs: Sequence[RequestOutput] = ()
    refused = None
    try:
        outputs = SCENARIOS[name].run(llm)
    except VLLMValidationError as error:
        refused = str(error)
    drafts, accepted, preemptions = (new - old for new, old in zip(counters(llm), before, strict=True))
    cached = sum(output.num_cached_tokens or 0 for output in outputs)
    return Result(name, tuple(map(completion, outputs)), drafts, accepted, preemptions, cached, refused)


def counters(llm: LLM) -> tuple[int, int, int]:
    values = {metric.name: int(getattr(metric, "value", 0)) for metric in llm.get_metrics()}
    return (
        values["vllm:spec_decode_num_drafts"],
        values["vllm:spec_decode_num_accepted_tokens"],
        values["vllm:num_preemptions"],
    )


def completion(output: RequestOutput) -> Completion:
    only = output.outputs[0]
    token_ids = tuple(only.token_ids)
    logprobs = tuple(listed[token].logprob for token, listed in zip(token_ids, only.logprobs or (), strict=False))
    return Completion(output.prompt or "", token_ids, only.text, only.finish_reason, only.stop_reason, logprobs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", type=Mode, required=True, help=", ".join(mode.value for mode in Mode))
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--draft", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--scenario", action="append", choices=SCENARIOS, help="all of them where none is named")
    arguments = parser.parse_args()
    os.environ |= environment(arguments.mode)
    if arguments.mode is Mode.ASYNC:
        from vllm_async_spec.vllm_plugin.patches.async_scheduling import open_cpu_gate

        open_cpu_gate()
    wanted = [name for name in SCENARIOS if name in (arguments.scenario or SCENARIOS)]
    with arguments.out.open("w", encoding="utf-8", buffering=1) as out:
        for result in results(wanted, arguments.mode, arguments.target, arguments.draft):
            out.write(json.dumps(asdict(result)) + "\n")


if __name__ == "__main__":
    main()
