"""The engines and the requests of every scenario; importable without vLLM."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from corruption import a_step_late, corrupted, one_too_many

from vllm_async_spec.demo.train import CORPUS, PROMPTS

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput, SamplingParams

Run = Callable[["LLM"], "Sequence[RequestOutput]"]


@dataclass(frozen=True, slots=True)
class Engine:
    draft_tokens: int = 3
    options: dict[str, Any] = field(default_factory=dict)
    asynchronous: bool = True
    """Whether vLLM can schedule it asynchronously."""


ENGINES = {
    "usual": Engine(),
    "one draft token": Engine(draft_tokens=1),
    "five draft tokens": Engine(draft_tokens=5),
    # Prompts of up to 690 tokens in many chunks, next to requests that decode already, in steps of 144 tokens.
    "small chunks": Engine(options={"max_num_batched_tokens": 144}),
    # 16 requests of up to 260 tokens come to want more than 100 blocks; one of the longest that is allowed wants 24.
    "little memory": Engine(options={"block_size": 32, "num_gpu_blocks_override": 40}),
    "n-gram": Engine(
        options={"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}},
        asynchronous=False,
    ),
}

MAX_MODEL_LEN = 768
PENALTIES: dict[str, Any] = {"presence_penalty": 0.8, "frequency_penalty": 0.6, "repetition_penalty": 1.2}
BAD_WORDS = [" the", "e", ". "]
STOP_STRINGS = ["the", ". ", "\n"]
MIN_TOKENS = 40
# The commonest bytes, as their ids: kept from each of them for long, the model takes one as soon as it may.
COMMON = [64, 68, 72, 77, 78, 81, 82, 83, 220]
REGEX = "[a-z]{3,9}( [a-z]{2,9}){6}[.!]"
CHOICES = ["draft", "target", "neither of them"]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "size": {"type": "integer"}, "up": {"type": "boolean"}},
    "required": ["name", "size", "up"],
    "additionalProperties": False,
}


def greedy(max_tokens: int = 64, **options: Any) -> SamplingParams:
    # `structured_outputs` may be a dictionary: vLLM's own class must not be shared.
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    if constraint := options.get("structured_outputs"):
        options = options | {"structured_outputs": StructuredOutputsParams(**constraint)}
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **options)


def passages(*lengths: int) -> list[str]:
    corpus = CORPUS.read_text(encoding="utf-8")
    return [corpus[i * 1500 : i * 1500 + length] for i, length in enumerate(lengths)]


def alike(prompts: Sequence[str] = PROMPTS, max_tokens: int = 64, **options: Any) -> Run:
    return lambda llm: llm.generate(list(prompts), [greedy(max_tokens, **options) for _ in prompts], use_tqdm=False)


def many(llm: LLM) -> Sequence[RequestOutput]:
    """16 requests at once, of different lengths; 1 token, and around the number of drafts, and many."""
    limits = [1, 2, 3, 4, 5, 6, 7, 8, 16, 33, 48, 64, 64, 64, 64, 96]
    return llm.generate(list(PROMPTS), [greedy(limit) for limit in limits], use_tqdm=False)


def queue(llm: LLM) -> Sequence[RequestOutput]:
    """More requests than the engine takes at once: rows are used again while their last step is still in flight."""
    prompts = [*PROMPTS, *PROMPTS, *PROMPTS[:8]]
    params = [greedy(1 + 5 * (number % 7)) for number in range(len(prompts))]
    return llm.generate(prompts, params, use_tqdm=False)


def twice(llm: LLM) -> Sequence[RequestOutput]:
    """The same prompts again, and then others that begin alike."""
    prompts = passages(300, 420, 540, 660)
    same, shorter = alike(prompts, 32), alike([prompt[:-90] for prompt in prompts], 32)
    return [*same(llm), *same(llm), *shorter(llm)]


ABORTED_AT = {2: 0, 5: 1, 8: 9, 11: 20, 14: 20}
"""Prompt, and how many tokens it has at least when it is aborted; 0 is before the engine has seen it."""


def abort(llm: LLM) -> Sequence[RequestOutput]:
    """Requests leave while a step with them is in flight, and new ones take their rows and their memory at once."""
    engine = llm.llm_engine
    for number, prompt in enumerate(PROMPTS):
        engine.add_request(str(number), prompt, greedy(ignore_eos=True))
    outputs: dict[int, RequestOutput] = {}
    due = dict(ABORTED_AT)
    while engine.has_unfinished_requests():
        lengths = {number: len(output.outputs[0].token_ids) for number, output in outputs.items()}
        for number in [number for number, at_least in due.items() if lengths.get(number, 0) >= at_least]:
            del due[number]
            engine.abort_request([str(number)])
            engine.add_request(str(number + 100), PROMPTS[number][::-1], greedy(ignore_eos=True))
        for output in engine.step():
            outputs[int(output.request_id)] = output
    return [outputs[number] for number in sorted(outputs)]


def mixed(llm: LLM) -> Sequence[RequestOutput]:
    """Everything next to everything else in one batch: some rows need exact host counts, and some do not."""
    kinds: list[dict[str, Any]] = [
        {},
        PENALTIES,
        {"bad_words": BAD_WORDS},
        {"structured_outputs": {"regex": REGEX}},
        {"min_tokens": MIN_TOKENS, "stop": STOP_STRINGS},
        {"logprobs": 1},
    ]
    params = [greedy(**kinds[number % len(kinds)]) for number in range(len(PROMPTS))]
    return llm.generate(list(PROMPTS), params, use_tqdm=False)


@dataclass(frozen=True, slots=True)
class Scenario:
    engine: str
    run: Run


SCENARIOS = {
    "one-1": Scenario("one draft token", alike(PROMPTS[1:2], 96)),
    "many-1": Scenario("one draft token", many),
    "one-5": Scenario("five draft tokens", alike(PROMPTS[1:2], 96)),
    "many-5": Scenario("five draft tokens", many),
    "one-3": Scenario("usual", alike(PROMPTS[1:2], 96)),
    "many-3": Scenario("usual", many),
    "queue": Scenario("usual", queue),
    "model-length": Scenario("usual", alike(passages(700, 720, 740, 760, 764, 766, 767), 200, ignore_eos=True)),
    "prefix-caching": Scenario("usual", twice),
    "to-the-end": Scenario("usual", alike(ignore_eos=True)),
    "abort": Scenario("usual", abort),
    "served": Scenario("usual", alike(max_tokens=48)),
    "end-of-text": Scenario("usual", alike(passages(60, 140, 250, 330), 400)),
    "stop-strings": Scenario("usual", alike(stop=STOP_STRINGS, include_stop_str_in_output=True)),
    "stop-tokens": Scenario("usual", alike(stop_token_ids=COMMON[-1:])),
    "min-tokens": Scenario("usual", alike(min_tokens=MIN_TOKENS, stop_token_ids=COMMON)),
    "penalties": Scenario("usual", alike(**PENALTIES)),
    "bad-words": Scenario("usual", alike(bad_words=BAD_WORDS)),
    "allowed-tokens": Scenario("usual", alike(allowed_token_ids=COMMON)),
    "logprobs": Scenario("usual", alike(logprobs=1)),
    "logit-bias": Scenario("usual", alike(logit_bias={5: 2.0})),
    "regex": Scenario("usual", alike(structured_outputs={"regex": REGEX})),
    "json-schema": Scenario("usual", alike(structured_outputs={"json": SCHEMA})),
    "choice": Scenario("usual", alike(structured_outputs={"choice": CHOICES})),
    "mixed": Scenario("usual", mixed),
    "one-too-many": Scenario("usual", corrupted(alike(logprobs=1), one_too_many)),
    "a-step-late": Scenario("usual", corrupted(many, a_step_late)),
    "chunked-prefill": Scenario("small chunks", alike([*passages(690, 500, 350), *PROMPTS[:9]], 40)),
    "preemption": Scenario("little memory", alike(max_tokens=160, ignore_eos=True)),
    "n-gram": Scenario("n-gram", many),
}
