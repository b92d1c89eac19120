"""Small cases of vLLM's features beyond plain greedy decoding, each with the checks that it must pass when served.

Features that vLLM itself refuses with speculative decoding are here too, with the words of the refusal.
"""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.acceptance import make_orbit
from benchmarks.loads import Load
from benchmarks.plans.engines import ATTENTIVE
from benchmarks.shapes import Method, find_shape

LOAD = Load("features", requests=16, running=16, prompt=(1, 288), output=(1, 64))
"""Bounds of every case's requests, by which an engine is sized."""
REGEX = r"[a-z]{3,9}( [a-z]{2,9}){2}[.!]"
CHOICES = ("draft", "target", "neither of them")
SCHEMA_KEYS = {"name", "up"}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "enum": ["draft", "target"]}, "up": {"type": "boolean"}},
    "required": sorted(SCHEMA_KEYS),
    "additionalProperties": False,
}
MIN_TOKENS = 24
TEXT_BYTES = 94
"""Number of the text shape's first tokens that are printable ASCII, from `!` on."""


class FeatureError(ValueError):
    """No such feature exists; the message lists all features."""


@dataclass(frozen=True, slots=True)
class Ask:
    prompt: tuple[int, ...]
    max_tokens: int
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Parameters beyond plain greedy decoding to the last token; `structured_outputs` as a dictionary."""
    adapter: bool = False
    turn: int = 0
    """Requests of a turn are served together, after the turn before."""


STOCK_AGAIN = "stock again"
"""In results: stock's answer without log-probabilities."""


@dataclass(frozen=True, slots=True)
class Feature:
    name: str
    about: str
    asks: Callable[[], list[Ask]]
    """Its requests, the same at each call. `twins` makes pairs, of which the second uses the feature."""
    seen: tuple[str, ...] = ()
    """Checks that must hold, by their names in `checks.CHECKS`."""
    shape: str = "tiny"
    method: Method = Method.EAGLE
    fallback: str | None = None
    """Reason for which the plugin must have waited for exact counts; None: it must not have waited at all."""
    engine: Mapping[str, Any] = field(default_factory=dict)
    asynchronous: bool = True
    """Whether vLLM schedules it asynchronously when asked to; else its log says why it does not."""
    refused: str | None = None
    """vLLM's words, if it refuses this with speculative decoding."""
    sampled: bool = False
    """Whether tokens are drawn, each request with a seed: then no near tie is forgiven, because none can be seen."""
    tokenizer: bool = False
    no_cpu: str | None = None
    """What vLLM's CPU platform lacks for it."""


def find_feature(name: str) -> Feature:
    """The case of this name.

    Raises:
        FeatureError: no case has this name.
    """
    if name not in FEATURES:
        raise FeatureError(f"there is no feature {name!r}; there are {', '.join(FEATURES)}")
    return FEATURES[name]


def prompts(number: int, shape: str, lengths: tuple[int, int] = (8, 96), seed: int = 0) -> list[tuple[int, ...]]:
    source, vocabulary = random.Random(seed), find_shape(shape).target["vocab_size"]
    return [tuple(source.randrange(vocabulary) for _ in range(source.randint(*lengths))) for _ in range(number)]


def banned_pairs() -> list[str]:
    """Texts of two characters that the text shape would often generate: a token and its successor."""
    successor = make_orbit(find_shape("tiny-text").target["vocab_size"], ATTENTIVE.share).successor.tolist()
    pairs = [(first, successor[first]) for first in range(TEXT_BYTES) if successor[first] < TEXT_BYTES]
    return ["".join(chr(ord("!") + token) for token in pair) for pair in pairs]


def _plain(shape: str = "tiny") -> Callable[[], list[Ask]]:
    return lambda: [Ask(prompt, 16 + 2 * number) for number, prompt in enumerate(prompts(24, shape))]


def twins(
    shape: str, *kinds: Mapping[str, Any], adapter: bool = False, common: Mapping[str, Any] | None = None
) -> Callable[[], list[Ask]]:
    """Every prompt twice: with `common` alone, and with one of `kinds` too, or for the adapter.

    Requests end at different times, and more arrive than run at once, so that batches gain and lose such requests.
    """

    shared = dict(common or {})

    def make() -> list[Ask]:
        asks = []
        for number, prompt in enumerate(prompts(12, shape)):
            length = 64 - 3 * number
            special = shared | dict(kinds[number % len(kinds)]) if kinds else shared
            asks += [Ask(prompt, 64, shared), Ask(prompt, length, special, adapter)]
        return asks

    return make


def _preempted() -> list[Ask]:
    return [Ask(prompt, 64) for prompt in prompts(16, "tiny", (40, 220))]


def _shared() -> list[Ask]:
    first = [Ask(prompt, 24) for prompt in prompts(8, "tiny", (64, 200))]
    again = [Ask(ask.prompt[: len(ask.prompt) - cut], 24, turn=1) for cut in (0, 7) for ask in first]
    return first + again


def _cycles() -> list[Ask]:
    """Prompts in which each token is followed by its successor, so that every next token has been seen before."""
    orbit = make_orbit(find_shape("tiny-text").target["vocab_size"], ATTENTIVE.share)
    asks = []
    for number in range(16):
        walk = [7 * number]
        while len(walk) < orbit.stranger:
            walk.append(int(orbit.successor[walk[-1]]))
        asks.append(Ask(tuple(walk), 16 + 3 * number))
    return asks


def _logprobs() -> list[Ask]:
    kinds: tuple[dict[str, Any], ...] = ({}, {"logprobs": 3}, {"logprobs": 1, "prompt_logprobs": 2}, {"logprobs": 0})
    return [
        Ask(prompt, 16 + 2 * number, kinds[number % len(kinds)]) for number, prompt in enumerate(prompts(24, "tiny"))
    ]


def _seeded() -> list[Ask]:
    asks = []
    for number, prompt in enumerate(prompts(8, "tiny")):
        drawn = {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "seed": number}
        asks += [Ask(prompt, 48), Ask(prompt, 48, drawn)]
    return asks


_GRAMMARS: tuple[dict[str, Any], ...] = (
    {"structured_outputs": {"regex": REGEX}, "ignore_eos": False},
    {"structured_outputs": {"choice": list(CHOICES)}, "ignore_eos": False},
    {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}, "ignore_eos": False},
)
_NO_DRAWING = "kernels that draw tokens where there are drafts"
_STOPS = {"stop_token_ids": list(range(0, 1024, 8)), "ignore_eos": False}

FEATURES: dict[str, Feature] = {
    feature.name: feature
    for feature in (
        Feature("eagle", "drafts of an EAGLE head", _plain(), ("accepted",)),
        Feature("eagle3", "drafts of an EAGLE-3 head", _plain(), ("accepted",), method=Method.EAGLE3),
        Feature(
            "mtp",
            "drafts of a prediction layer, MLA",
            _plain("tiny-mtp"),
            ("accepted",),
            shape="tiny-mtp",
            method=Method.MTP,
            engine={"attention_config": {"backend": "FLASH_ATTN_MLA"}, "block_size": 64},
            no_cpu="multi-head latent attention",
        ),
        Feature("draft_model", "drafts of a model of their own", _plain(), ("accepted",), method=Method.DRAFT_MODEL),
        Feature(
            "ngram",
            "drafts from what was said before, found on the host",
            _cycles,
            ("accepted",),
            shape="tiny-text",
            method=Method.NGRAM,
            asynchronous=False,
        ),
        Feature(
            "ngram_gpu",
            "the same, found on the GPU",
            _cycles,
            ("accepted",),
            shape="tiny-text",
            method=Method.NGRAM_GPU,
            fallback="n-gram drafts on the GPU",
            # vLLM compiles the kernel for this, and refuses to start without compilation.
            engine={"compilation_config": {"mode": 3, "cudagraph_mode": "FULL_DECODE_ONLY"}},
            no_cpu="drafts on a GPU",
        ),
        Feature(
            "preemption",
            "long prompts in chunks, and too few blocks for all",
            _preempted,
            ("accepted", "chunked", "preempted"),
            engine={"max_num_batched_tokens": 96, "num_gpu_blocks_override": 64},
        ),
        Feature(
            "prefix-caching",
            "prompts that were there before",
            _shared,
            ("accepted", "cached"),
            engine={"enable_prefix_caching": True},
        ),
        Feature(
            "structured-output",
            "a regular expression, a choice and a JSON schema",
            twins("tiny-text", *_GRAMMARS),
            ("accepted", "changed", "grammar"),
            shape="tiny-text",
            tokenizer=True,
        ),
        Feature(
            "lora",
            "every other request for an adapter",
            twins("tiny", adapter=True),
            ("accepted", "changed"),
            # An EAGLE head would share embeddings that are wrapped for adapters.
            method=Method.DRAFT_MODEL,
            # vLLM's CPU kernels use the last adapter's slot for rows without an adapter, so that slot stays empty.
            engine={"enable_lora": True, "max_lora_rank": 8, "max_loras": 2},
        ),
        Feature("logprobs", "log-probabilities of outputs and prompts", _logprobs, ("accepted", "logprobs")),
        Feature(
            "penalties",
            "presence, frequency and repetition",
            twins("tiny", {"presence_penalty": 0.8, "frequency_penalty": 0.6, "repetition_penalty": 1.2}),
            ("accepted", "changed"),
            fallback="penalties",
        ),
        Feature(
            "bad-words",
            "words that must not be said, which a draft proposes all the time",
            twins("tiny-text", {"bad_words": banned_pairs()}),
            ("accepted", "changed", "bad words"),
            shape="tiny-text",
            tokenizer=True,
            fallback="bad words",
        ),
        Feature(
            "min-tokens",
            "no end before its time",
            twins("tiny", {"min_tokens": MIN_TOKENS}, common=_STOPS),
            ("accepted", "changed", "min tokens"),
            fallback="min_tokens",
        ),
        Feature(
            "logits-processor",
            "a processor of one's own",
            _plain(),
            engine={"logits_processors": ["vllm.v1.sample.logits_processor.builtin:MinPLogitsProcessor"]},
            refused="Custom logits processors are not supported when speculative decoding is enabled",
        ),
        Feature(
            "top-k",
            "the first of one, drawn: greedy by another way",
            twins("tiny", {"temperature": 1.0, "top_k": 1, "seed": 1}),
            ("accepted",),
            sampled=True,  # of two tokens with equal float16 logits, one is drawn
            no_cpu=_NO_DRAWING,
        ),
        Feature(
            "top-k-top-p",
            "drawn from few, each request with a seed",
            _seeded,
            ("accepted", "changed"),
            sampled=True,
            no_cpu=_NO_DRAWING,
        ),
        Feature(
            "mrope",
            "positions of three axes, which differ over the prompt",
            _plain("tiny-mrope"),
            ("accepted", "M-RoPE"),
            shape="tiny-mrope",
        ),
        # Last, because an engine does not survive a request that vLLM refuses.
        Feature(
            "logit-bias",
            "a bias of single tokens",
            twins("tiny", {"logit_bias": {5: 2.0}}),
            refused="logit_bias sampling parameters are not yet supported with speculative decoding",
        ),
    )
}
