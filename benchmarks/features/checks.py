"""Checks of a case beyond stock's tokens: that the feature was active and did its work."""

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.features.cases import CHOICES, MIN_TOKENS, REGEX, SCHEMA_KEYS, Ask, Feature, banned_pairs

Served = dict[str, Any]
"""What `engine.serve_feature` returns."""
Check = Callable[[Sequence[Ask], Served], tuple[bool, str]]
"""Returns whether the check holds, and what was seen."""

_WORTH = 1.1
"""Tokens a step and request above which drafts count as accepted."""


def accepted(_: Sequence[Ask], served: Served) -> tuple[bool, str]:
    """Drafts are accepted; otherwise the case shows nothing."""
    return served["accepted"] > _WORTH, f"{served['accepted']:.2f} tokens a step"


def chunked(_: Sequence[Ask], served: Served) -> tuple[bool, str]:
    """Prompts did not fit into one step."""
    return served["steps"]["chunks"] > 0, f"{served['steps']['chunks']} prompts in chunks"


def preempted(_: Sequence[Ask], served: Served) -> tuple[bool, str]:
    """Requests lost their blocks and came back."""
    return served["steps"]["resumed"] > 0, f"{served['steps']['resumed']} resumed"


def cached(_: Sequence[Ask], served: Served) -> tuple[bool, str]:
    """Prompt tokens were in the cache already."""
    return served["steps"]["cached"] > 0, f"{served['steps']['cached']} tokens cached"


def mrope(_: Sequence[Ask], served: Served) -> tuple[bool, str]:
    """The runner has positions of three axes."""
    return served["mrope"], "M-RoPE" if served["mrope"] else "no M-RoPE"


def changed(asks: Sequence[Ask], served: Served) -> tuple[bool, str]:
    """Of two requests that differ in the feature only, some differ in their tokens."""
    requests = served["requests"]
    pairs = [*zip(requests[::2], requests[1::2], strict=True)]
    assert all(one.prompt == other.prompt for one, other in zip(asks[::2], asks[1::2], strict=True))
    unlike = sum(_parted(one["tokens"], other["tokens"]) for one, other in pairs)
    return unlike > 0, f"{unlike} of {len(pairs)} changed"


def _parted(one: list[int], other: list[int]) -> bool:
    """Whether the two differ at any place that both have; an earlier end is no difference."""
    return any(mine != yours for mine, yours in zip(one, other, strict=False))


def grammar(asks: Sequence[Ask], served: Served) -> tuple[bool, str]:
    """Every text that a grammar ended matches its grammar, and there is at least one."""
    bound = [
        (ask.sampling["structured_outputs"], request)
        for ask, request in zip(asks, served["requests"], strict=True)
        if "structured_outputs" in ask.sampling
    ]
    ended = [(constraint, request["text"]) for constraint, request in bound if request["finished"] == "stop"]
    right = sum(_follows(constraint, text) for constraint, text in ended)
    return right == len(ended) > 0, f"{right} of {len(ended)} texts in their grammar"


def _follows(constraint: dict[str, Any], text: str) -> bool:
    if "regex" in constraint:
        return re.fullmatch(REGEX, text) is not None
    if "choice" in constraint:
        return text in CHOICES
    try:
        value = json.loads(text)
    except ValueError:
        return False
    return isinstance(value, dict) and value.keys() == SCHEMA_KEYS


def bad_words(asks: Sequence[Ask], served: Served) -> tuple[bool, str]:
    """Requests with bad words never generate them, and the others do."""
    words = banned_pairs()

    def said(bound: bool) -> int:
        texts = [
            request["text"]
            for ask, request in zip(asks, served["requests"], strict=True)
            if ("bad_words" in ask.sampling) is bound
        ]
        return sum(text.count(word) for text in texts for word in words)

    return said(True) == 0 < said(False), f"{said(True)} said, {said(False)} by the others"


def min_tokens(asks: Sequence[Ask], served: Served) -> tuple[bool, str]:
    """Requests with a minimum length reach it if their `max_tokens` allows, and others end before it."""
    lengths: dict[bool, list[int]] = {True: [], False: []}
    for ask, request in zip(asks, served["requests"], strict=True):
        if ask.max_tokens > MIN_TOKENS:
            lengths["min_tokens" in ask.sampling].append(len(request["tokens"]))
    shortest = {bound: min(each) for bound, each in lengths.items()}
    return shortest[True] >= MIN_TOKENS > shortest[False], f"at least {shortest[True]}, {shortest[False]} by the others"


def logprobs(asks: Sequence[Ask], served: Served) -> tuple[bool, str]:
    """Requests with log-probabilities have one for each token; `run.judge` compares the values."""
    asked = [
        (ask, request) for ask, request in zip(asks, served["requests"], strict=True) if "logprobs" in ask.sampling
    ]
    right = 0
    for ask, request in asked:
        prompt = len(ask.prompt) - 1 if "prompt_logprobs" in ask.sampling else 0
        right += len(request.get("logprobs", ())) == len(request["tokens"]) + prompt
    return right == len(asked) > 0, f"{right} of {len(asked)} complete"


CHECKS: dict[str, Check] = {
    "accepted": accepted,
    "chunked": chunked,
    "preempted": preempted,
    "cached": cached,
    "M-RoPE": mrope,
    "changed": changed,
    "grammar": grammar,
    "bad words": bad_words,
    "min tokens": min_tokens,
    "logprobs": logprobs,
}


def check(feature: Feature, served: Served) -> list[dict[str, Any]]:
    """Each check of the case: its name, whether it holds, and what was seen."""
    asks, found = feature.asks(), []
    for name in feature.seen:
        held, saw = CHECKS[name](asks, served)
        found.append({"what": name, "held": held, "saw": saw})
    return found
