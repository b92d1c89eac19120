"""Requests of a load, written as the file that vLLM's client reads with `--dataset-name custom`.

Lengths are 1,000 random rows of Azure's trace of conversations of 2023 (19,366 requests, CC-BY), published with Patel
et al., "Splitwise: Efficient generative LLM inference using phase splitting", ISCA 2024:
https://github.com/Azure/AzurePublicDataset. In the trace half of the prompts have 1,020 tokens or fewer, and half of
the outputs 129 or fewer; the means are 1,155 and 211. Token ids are random, as the trace has no text.
"""

import csv
import functools
import json
import lzma
import math
import random
from pathlib import Path

from benchmarks.serving.plan import ServeLoad, ServePlan
from benchmarks.serving.tokenizer import as_text

_TRACE = Path(__file__).with_name("azure_conversations_2023.csv.xz")
_PREFIX = 1024
"""Tokens of a shared prefix."""
_SAMPLED_PROMPT, _SAMPLED_OUTPUT = 512, 32
"""Most prompt tokens, and the output tokens, of a request whose tokens are compared."""
_RESERVED = 2
"""Token ids below are the beginning and the end of text."""


@functools.cache
def trace() -> tuple[tuple[int, int], ...]:
    """Prompt tokens and output tokens of the trace's requests."""
    with lzma.open(_TRACE, "rt", newline="") as lines:
        return tuple((int(row["context"]), int(row["generated"])) for row in csv.DictReader(lines))


def write_requests(path: Path, load: ServeLoad, number: int, plan: ServePlan, vocabulary: int, seconds: float) -> int:
    """Write the requests of `load` in pass `number`, the same for all arms, and return how many there are.

    Each pass has prompts of its own: a server that has seen a prompt before would find it in its prefix cache.
    """
    source = random.Random(f"{load.name} {number}")
    prefixes = [_tokens(source, _PREFIX // plan.scale, vocabulary) for _ in range(load.prefixes)]
    rows = []
    for _ in range(load.requests(seconds)):
        lengths = source.choice(trace())
        prompt, output = math.ceil(lengths[0] / plan.scale), math.ceil(lengths[1] / plan.output_scale)
        own = _tokens(source, min(prompt, _PREFIX // plan.scale) if prefixes else prompt, vocabulary)
        rows.append(((source.choice(prefixes) if prefixes else []) + own, max(output, 2)))
    return _write(path, rows)


def write_sample(path: Path, requests: int, vocabulary: int, scale: int, *, output: int = _SAMPLED_OUTPUT) -> int:
    """Write the requests whose tokens are compared, or which warm a server up, and return how many there are."""
    source = random.Random(requests)
    lengths = [min(source.choice(trace())[0], _SAMPLED_PROMPT) for _ in range(requests)]
    return _write(path, [(_tokens(source, math.ceil(length / scale), vocabulary), output) for length in lengths])


def _tokens(source: random.Random, length: int, vocabulary: int) -> list[int]:
    return [source.randrange(_RESERVED, vocabulary - 1) for _ in range(length)]


def _write(path: Path, rows: list[tuple[list[int], int]]) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = (  # an audit reads `max_tokens`
        json.dumps({"prompt": as_text(prompt), "output_tokens": output, "max_tokens": output})
        for prompt, output in rows
    )
    path.write_text("\n".join(lines) + "\n")
    return len(rows)
