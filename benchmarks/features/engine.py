"""Serves a case in the process of its engine, and records tokens, steps and waits."""

import contextlib
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.features.cases import Ask, Feature
from benchmarks.soak.engine import CHOICES, expected_of, runner_of


@dataclass(slots=True)
class Steps:
    """Counts of the scheduler's decisions while a case was served."""

    decoded: int = 0
    """Rows of requests that had tokens already."""
    chunks: int = 0
    """New requests whose first schedule did not hold the whole prompt."""
    resumed: int = 0
    """Requests that resumed after a preemption."""
    cached: int = 0
    """Prompt tokens that were found in the cache."""
    early: int = 0
    """Steps that were scheduled after the outputs of all earlier steps had arrived."""


def serve_feature(llm: Any, feature: Feature, *, noted: bool, adapter: str | None) -> dict[str, Any]:
    """Serve a case once.

    Args:
        llm: a `vllm.LLM` whose core and worker are in this process.
        noted: whether to record which other tokens were close behind each token. That needs log-probabilities of the
            distribution that a token was chosen from, so drawn tokens are chosen greedily instead.
        adapter: directory of the LoRA adapter.

    Returns:
        `requests`, each with its answer; and counts of steps, accepted drafts and fallbacks.
    """
    asks = feature.asks()
    report = sys.modules.get("vllm_async_spec.sync_policy")
    before = dict(report.sync_report().fallbacks) if report else {}
    llm.reset_prefix_cache()
    with _watched(llm) as steps:
        said = _serve(llm, asks, noted=noted, adapter=adapter)
    after = dict(report.sync_report().fallbacks) if report else {}
    requests = [_said(llm, feature, ask, output, noted=noted) for ask, output in zip(asks, said, strict=True)]
    tokens = sum(len(request["tokens"]) - 1 for request in requests)
    return {
        "requests": requests,
        "steps": asdict(steps),
        "accepted": tokens / steps.decoded if steps.decoded else 0.0,
        "fallbacks": dict(Counter(after) - Counter(before)),
        "mrope": bool(getattr(runner_of(llm), "uses_mrope", False)),
        "patch": _patch(),
    }


def _serve(llm: Any, asks: list[Ask], *, noted: bool, adapter: str | None) -> list[Any]:
    from vllm.lora.request import LoRARequest

    lora = LoRARequest("noise", 1, adapter) if adapter else None
    said: dict[int, Any] = {}
    for turn in sorted({ask.turn for ask in asks}):
        chosen = [(place, ask) for place, ask in enumerate(asks) if ask.turn == turn]
        outputs = llm.generate(
            [{"prompt_token_ids": list(ask.prompt)} for _, ask in chosen],
            [_sampling(ask, noted=noted) for _, ask in chosen],
            use_tqdm=False,
            lora_request=[lora if ask.adapter else None for _, ask in chosen] if lora else None,
        )
        said.update(zip((place for place, _ in chosen), outputs, strict=True))
    return [said[place] for place in range(len(asks))]


def _sampling(ask: Ask, *, noted: bool) -> Any:
    options = {"temperature": 0.0, "ignore_eos": True, "detokenize": False} | dict(ask.sampling)
    if noted:
        options = {name: value for name, value in options.items() if name not in ("top_k", "top_p", "seed")}
        options |= {"temperature": 0.0, "logprobs": CHOICES}
    return sampling_params(options, ask.max_tokens)


def sampling_params(options: Mapping[str, Any], max_tokens: int) -> Any:
    """vLLM's parameters of a request whose output comes at its end; `structured_outputs` is a dictionary."""
    import vllm
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    given = dict(options)
    if constraint := given.get("structured_outputs"):
        given["structured_outputs"] = StructuredOutputsParams(**constraint)
    return vllm.SamplingParams(max_tokens=max_tokens, output_kind=RequestOutputKind.FINAL_ONLY, **given)


def _said(llm: Any, feature: Feature, ask: Ask, output: Any, *, noted: bool) -> dict[str, Any]:
    first = output.outputs[0]
    tokens = [int(token) for token in first.token_ids]
    made: dict[str, Any] = {"tokens": tokens, "finished": first.finish_reason}
    if noted:
        made["behind"] = expected_of(first).behind
    elif "logprobs" in ask.sampling:
        rows = [*zip(tokens, first.logprobs, strict=True)]
        given = zip(ask.prompt[1:], (output.prompt_logprobs or [])[1:], strict=False)
        made["logprobs"] = [float(row[token].logprob) for token, row in (*rows, *given)]
    if feature.tokenizer:
        made["text"] = llm.get_tokenizer().decode(tokens, skip_special_tokens=True)
    return made


@contextlib.contextmanager
def _watched(llm: Any) -> Iterator[Steps]:
    """Count the scheduler's decisions."""
    core, steps = llm.llm_engine.engine_core.engine_core, Steps()
    scheduler, original = core.scheduler, core.scheduler.schedule

    def schedule(*args: Any, **kwargs: Any) -> Any:
        made = original(*args, **kwargs)
        running = made.scheduled_cached_reqs
        steps.early += not core.batch_queue and bool(running.req_ids)
        steps.decoded += sum(outputs > 0 for outputs in running.num_output_tokens)
        steps.resumed += len(running.resumed_req_ids)
        for request in made.scheduled_new_reqs:
            computed = request.num_computed_tokens
            steps.cached += computed
            steps.chunks += computed + made.num_scheduled_tokens[request.req_id] < len(request.prompt_token_ids)
        return made

    scheduler.schedule = schedule
    try:
        yield steps
    finally:
        del scheduler.schedule


def _patch() -> str:
    """State of the patch `optimistic-runner` in this process."""
    module = sys.modules.get("vllm_async_spec.vllm_plugin.state")
    plugin = module.active_plugin() if module else None
    if plugin is None or plugin.ledger is None:
        return "not loaded"
    outcome = plugin.ledger.outcomes["optimistic-runner"]
    return f"{outcome.state.value}: {outcome.detail}" if outcome.detail else str(outcome.state.value)
