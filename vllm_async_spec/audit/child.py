"""The engine process of `vllm-async-spec audit --model`: `python -m vllm_async_spec.audit.child SETUP`.

The process writes JSON lines to standard output: its progress, then the report or the error. The engine's own processes
are as vLLM lays them out.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn

from vllm_async_spec.audit.engine import SKIP, AuditError, Ran, audit_llm, draft_counts
from vllm_async_spec.audit.loads import LoadError, Work
from vllm_async_spec.audit.report import Report
from vllm_async_spec.json_child import answering


def main() -> None:
    """Make the engine, audit it, and write the report."""
    with answering() as answer:
        try:
            report = _audit(json.loads(sys.argv[1]), lambda stage: answer({"stage": stage}))
            answer({"report": report.to_dict()})
        except (AuditError, LoadError) as error:
            answer({"error": str(error)})


def _audit(setup: dict[str, Any], stage: Any) -> Report:
    """Audit the engine of `engine_arguments`, as on vLLM's command line; `stage` is called with what is being done."""
    stage("starting the engine")
    import vllm

    arguments = _engine_arguments(setup["engine_arguments"], setup["batch"])
    llm = vllm.LLM(**arguments)
    config = llm.llm_engine.vllm_config
    speculation = config.speculative_config
    work = Work.make(
        setup["load"],
        batch=setup["batch"],
        steps=SKIP + setup["steps"] + 8,
        tokens_a_step=1 + (speculation.num_speculative_tokens if speculation else 0),
        vocabulary=config.model_config.get_vocab_size(),
        longest=config.model_config.max_model_len,
    )
    stage("warming up")
    run = _running(llm, work)
    run()
    stage("recording")
    return audit_llm(
        llm,
        run,
        steps=setup["steps"],
        name=work.name,
        requests=work.together,
        rank=setup["rank"],
        decided_by=_decided_by(arguments.get("async_scheduling"), bool(config.scheduler_config.async_scheduling)),
    )


def _decided_by(asked: bool | None, found: bool) -> str:
    """Who decided, for an engine without the plugin. With the plugin the worker's answer counts."""
    if asked is None:
        return "decided by vLLM"
    option = "--async-scheduling" if asked else "--no-async-scheduling"
    return "decided by user" if asked == found else f"decided by vLLM, despite {option}"


def _engine_arguments(given: list[str], batch: int) -> dict[str, Any]:
    """The arguments of `vllm.LLM` that differ from vLLM's defaults, as its own parser reads them."""
    from vllm.engine.arg_utils import EngineArgs

    try:
        from vllm.utils.argparse_utils import FlexibleArgumentParser
    except ImportError:
        from vllm.utils import FlexibleArgumentParser

    def refuse(message: str) -> NoReturn:
        raise AuditError(f"vLLM does not take these engine arguments: {message}")

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(prog="vllm-async-spec audit"))
    parser.error = refuse
    parsed = EngineArgs.from_cli_args(parser.parse_args(given))
    defaults = EngineArgs(model=parsed.model)
    chosen = {
        field.name: getattr(parsed, field.name)
        for field in dataclasses.fields(EngineArgs)
        if getattr(parsed, field.name) != getattr(defaults, field.name)
    }
    # Defaults of the audit, which the user may override: the batch size, and no prefix caching.
    return {
        "max_num_seqs": batch,
        "enable_prefix_caching": False,
        "disable_log_stats": False,
        **chosen,
        "model": parsed.model,
    }


def _running(llm: Any, work: Work) -> Callable[[], Ran]:
    """A function that gives the engine its work, once with each call."""
    import vllm

    prompts = [
        request.prompt if isinstance(request.prompt, str) else {"prompt_token_ids": list(request.prompt)}
        for request in work.requests
    ]
    sampling = [
        vllm.SamplingParams(temperature=0.0, max_tokens=request.max_tokens, ignore_eos=True, detokenize=False)
        for request in work.requests
    ]

    def run() -> Ran:
        drafts, accepted = draft_counts(llm)
        start = time.perf_counter()
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - start
        more_drafts, more_accepted = draft_counts(llm)
        drafts = more_drafts - drafts
        tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        return Ran(tokens, seconds, 1 + (more_accepted - accepted) / drafts if drafts else None)

    return run


if __name__ == "__main__":
    main()
