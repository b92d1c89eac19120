"""The cases: vLLM's features, one at a time, in a batch of 32; and the engines that serve them.

Most cases are sampling parameters, so one engine serves them in turn. The others name the engine that they need. Each
case has a reference, plain decoding under the same load, which the same engine or its base serves.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.acceptance import make_orbit
from benchmarks.loads import Load, Request, make_requests
from benchmarks.shapes import Method, find_shape

BATCH = 32
PARALLEL = 4
"""Sequences of each request, of the case `n-4`."""
_OUTPUT = 192
DRAFT_TOKENS = 3
_PREFIX = 48
"""Tokens at the start of every prompt that shares them."""

STEADY = Load("steady", BATCH, BATCH, (64, 64), (_OUTPUT, _OUTPUT))
"""All requests decode from the beginning to the end, so that a step is a decode step."""
CHURN = Load("churn", 3 * BATCH, BATCH, (64, 160), (32, 128))
"""A request arrives as another ends."""
LOADS = (STEADY, CHURN, Load("longest prompt", BATCH, BATCH, (_OUTPUT + 16, _OUTPUT + 16), (_OUTPUT, _OUTPUT)))
"""By which an engine is sized; the last is that of drafts found in the prompt."""

SCHEMA = {
    "type": "array",
    "minItems": 256,  # more than any request's tokens can hold, so that no request ends early
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string"}, "up": {"type": "boolean"}},
        "required": ["name", "up"],
        "additionalProperties": False,
    },
}


class WaitsError(ValueError):
    """Cases can't be run as asked; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Package:
    """A Python package that a case needs, in the environment of its engine."""

    module: str
    distribution: str


@dataclass(frozen=True, slots=True)
class Engine:
    """One configuration of vLLM, beyond its defaults."""

    name: str
    base: str = "plain"
    """The engine that serves the reference; its own name, if it serves plain decoding itself."""
    method: Method | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    shapes: Mapping[str, str] | None = None
    """Shape of the model, by the shape that was asked for; None: the shape itself, whichever it is."""
    package: Package | None = None
    adapters: int = 0
    """LoRA adapters that its requests name."""
    no_cpu: str | None = None
    """What vLLM's CPU platform lacks for it."""

    def shape(self, asked: str) -> str | None:
        """Shape of its model; None if there is no such engine at the shape that was asked for."""
        return asked if self.shapes is None else self.shapes.get(asked)


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    about: str
    engine: str = "plain"
    load: Load = STEADY
    reference: str | None = "plain"
    """The case of plain decoding that it is compared with; None for such a case itself."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Parameters beyond plain greedy decoding to the last token."""
    special: int | None = None
    """Requests that have these parameters; None for all."""
    seeded: bool = False
    """Whether each request has a seed of its own."""
    adapters: int = 0
    """LoRA adapters that the requests take in turn."""
    prefix: bool = False
    """Whether all prompts begin with the same tokens."""
    repeats: bool = False
    """Whether the output is in the prompt already, where drafts without a model find it."""
    tokenizer: bool = False
    package: Package | None = None


@dataclass(frozen=True, slots=True)
class CaseRequest(Request):
    sampling: Mapping[str, Any] = field(default_factory=dict)
    adapter: int | None = None


_MLA = {"1b": "mla-dense", "8b": "mla", "tiny": "tiny-mtp"}
_JSON: dict[str, Any] = {
    "sampling": {"structured_outputs": {"json": SCHEMA}, "ignore_eos": False},
    "tokenizer": True,
    "package": Package("xgrammar", "xgrammar"),
}
_DRAWN = {"temperature": 0.8}

ENGINES: dict[str, Engine] = {
    engine.name: engine
    for engine in (
        Engine("plain"),
        Engine(
            "lora",
            options={"enable_lora": True, "max_loras": 4, "max_cpu_loras": 8, "max_lora_rank": 8},
            adapters=8,
            package=Package("safetensors", "safetensors"),
        ),
        Engine("kv-offloading", options={"kv_offloading_size": 2}, no_cpu="offloading from a GPU"),
        Engine("eagle", method=Method.EAGLE),
        Engine("eagle3", method=Method.EAGLE3),
        Engine("draft_model", method=Method.DRAFT_MODEL),
        Engine("ngram", method=Method.NGRAM),
        Engine("ngram_gpu", method=Method.NGRAM_GPU, no_cpu="drafts on a GPU"),
        Engine("suffix", method=Method.SUFFIX, package=Package("arctic_inference", "arctic-inference")),
        Engine("plain-mla", base="plain-mla", shapes=_MLA, no_cpu="multi-head latent attention"),
        Engine("mtp", base="plain-mla", method=Method.MTP, shapes=_MLA, no_cpu="multi-head latent attention"),
    )
}

CASES: dict[str, Case] = {
    case.name: case
    for case in (
        Case("plain", "plain greedy decoding", reference=None),
        Case("json-1", "a JSON schema on one request of 32", special=1, **_JSON),
        Case("json-all", "a JSON schema on all requests", **_JSON),
        Case("logprobs-1", "`logprobs=1`", sampling={"logprobs": 1}),
        Case("logprobs-20", "`logprobs=20`", sampling={"logprobs": 20}),
        Case(
            "penalties",
            "presence, frequency and repetition penalties",
            sampling={"presence_penalty": 0.8, "frequency_penalty": 0.6, "repetition_penalty": 1.2},
        ),
        Case("min-tokens", "`min_tokens`", sampling={"min_tokens": _OUTPUT, "stop_token_ids": [7]}),
        Case("stop-strings", "a stop string", sampling={"stop": ["###"], "detokenize": True}, tokenizer=True),
        Case("top-k", "`top_k=20`", sampling=_DRAWN | {"top_k": 20}),
        Case("top-p", "`top_p=0.9`", sampling=_DRAWN | {"top_p": 0.9}),
        Case("seeds", "a seed on each request", sampling=_DRAWN, seeded=True),
        Case("n-4", "8 requests with `n=4`", sampling=_DRAWN | {"n": PARALLEL}),
        Case("churn", "plain decoding, requests come and go", load=CHURN, reference=None),
        Case("prefix-caching", "the same, prompts share 48 tokens", load=CHURN, reference="churn", prefix=True),
        Case("lora-1", "the same, all requests for one LoRA adapter", "lora", CHURN, "churn", adapters=1),
        Case("lora-8", "the same, requests for 8 LoRA adapters, 4 at once", "lora", CHURN, "churn", adapters=8),
        Case("kv-offloading", "the same, keys and values offloaded to the host", "kv-offloading", CHURN, "churn"),
        Case("eagle", "drafts of an EAGLE head", "eagle"),
        Case("eagle3", "drafts of an EAGLE-3 head", "eagle3"),
        Case("draft_model", "drafts of a draft model", "draft_model"),
        Case("ngram", "n-gram drafts, found on the host", "ngram", repeats=True),
        Case("ngram_gpu", "n-gram drafts, found on the GPU", "ngram_gpu", repeats=True),
        Case("suffix", "drafts of suffix decoding", "suffix", repeats=True),
        Case("plain-mla", "plain decoding of the model with a prediction layer", "plain-mla", reference=None),
        Case("mtp", "drafts of a prediction layer (MTP)", "mtp", reference="plain-mla"),
    )
}


def find_cases(names: Sequence[str]) -> list[Case]:
    """The cases of these names in the order of `CASES`; all if there are no names.

    Raises:
        WaitsError: a name has no case.
    """
    for name in names:
        if name not in CASES:
            raise WaitsError(f"there is no case {name!r}; there are {', '.join(CASES)}")
    return [case for case in CASES.values() if not names or case.name in names]


def requests_of(case: Case, shape: str) -> tuple[Load, list[CaseRequest]]:
    """The requests of a case for a shape's vocabulary, the same at each call, and their load.

    `requests` and `running` of the load count sequences, of which a request with `n` has several.
    """
    vocabulary = find_shape(shape).target["vocab_size"]
    plain = _walks(vocabulary) if case.repeats else make_requests(case.load, vocabulary)
    if case.prefix:
        plain = [replace(each, prompt=plain[0].prompt[:_PREFIX] + each.prompt[_PREFIX:]) for each in plain]
    plain = plain[: len(plain) // case.sampling.get("n", 1)]
    requests = []
    for number, each in enumerate(plain):
        asked = dict(case.sampling) if case.special is None or number < case.special else {}
        if case.seeded:
            asked["seed"] = number
        adapter = number % case.adapters if case.adapters else None
        requests.append(CaseRequest(each.prompt, each.max_tokens, asked, adapter))
    return case.load, requests


def _walks(vocabulary: int) -> list[Request]:
    """Requests whose prompts walk along the target's cycle (`acceptance`) and then return to its beginning."""
    successor = make_orbit(vocabulary, 1.0).successor.tolist()
    requests = []
    for number in range(BATCH):
        walk = [number * len(successor) // BATCH]
        while len(walk) < _OUTPUT + 8:
            walk.append(successor[walk[-1]])
        requests.append(Request((*walk, *walk[:DRAFT_TOKENS]), _OUTPUT))
    return requests
