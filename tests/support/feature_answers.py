"""What an engine of the feature cases says, stock's and a good one's, with mistakes planted in it."""

import copy
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.arms import Plugin
from benchmarks.features.cases import Feature, banned_pairs, find_feature
from benchmarks.features.run import Place, Seen, judge
from benchmarks.soak.engine import NEAR

GPU = Place("0.18.1", None, Path("cache"))
FACTS = {"vllm": "0.18.1", "async_scheduling": True}


def served(feature: Feature, **more: Any) -> dict[str, Any]:
    """What a good engine says: each request its own tokens, and twins different ones."""
    requests = [
        {"tokens": [7 * number % 250 + place for place in range(ask.max_tokens)], "finished": "length", "text": ""}
        for number, ask in enumerate(feature.asks())
    ]
    steps = {"decoded": 100, "chunks": 0, "resumed": 0, "cached": 0, "early": 0}
    made = {"requests": requests, "steps": steps, "accepted": 2.0, "mrope": False, "fallbacks": {}, "patch": "applied"}
    return made | more


def noted(feature: Feature) -> dict[str, Any]:
    made = served(feature)
    for request in made["requests"]:
        request["behind"] = [{"999": NEAR / 2, "998": 2 * NEAR} for _ in request["tokens"]]
    return made


def seen(feature: Feature, change: Callable[[dict[str, Any]], None] = lambda made: None, **facts: Any) -> Seen:
    fallbacks = {feature.fallback: 3} if feature.fallback else {}
    made = served(feature, fallbacks=fallbacks)
    change(made)
    return Seen(facts=FACTS | facts, served=made, late=copy.deepcopy(made))


def stock(feature: Feature) -> Seen:
    return Seen(facts=FACTS, noted=noted(feature), served=served(feature))


def judged(feature: Feature, subject: Seen) -> dict[str, Any]:
    found = judge(feature, stock(feature), subject, GPU, Plugin.ON)
    json.dumps(found)
    return found


def plain(name: str = "eagle", **more: Any) -> Feature:
    return dataclasses.replace(find_feature(name), seen=("accepted",), **more)


def planted(request: int, place: int, token: int) -> Callable[[dict[str, Any]], None]:
    def change(made: dict[str, Any]) -> None:
        made["requests"][request]["tokens"][place] = token

    return change


GOOD = {"chunks": 3, "resumed": 2, "cached": 50, "decoded": 100}


def good(feature: Feature) -> dict[str, Any]:
    made = served(feature, steps=dict(GOOD), mrope=True)
    texts = {"regex": "abc de fg!", "choice": "draft", "json": '{"name": "draft", "up": true}'}
    for ask, request in zip(feature.asks(), made["requests"], strict=True):
        if constraint := ask.sampling.get("structured_outputs"):
            request.update(finished="stop", text=next(text for kind, text in texts.items() if kind in constraint))
        if "bad_words" not in ask.sampling and feature.name == "bad-words":
            request["text"] = banned_pairs()[0]
        if feature.name == "min-tokens" and "min_tokens" not in ask.sampling:
            request["tokens"] = request["tokens"][:4]
        if "logprobs" in ask.sampling:
            prompt = len(ask.prompt) - 1 if "prompt_logprobs" in ask.sampling else 0
            request["logprobs"] = [-1.0] * (len(request["tokens"]) + prompt)
    return made
