"""Loads for an audited engine."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROMPT_TOKENS = 64


class LoadError(ValueError):
    """A load does not exist or can't be read; the message says what to give."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request: token identifiers, or text for the model's tokenizer."""

    prompt: tuple[int, ...] | str
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Work:
    """Requests for an engine, of which at most `together` run at once."""

    name: str
    requests: tuple[Request, ...]
    together: int

    @classmethod
    def make(cls, load: str, *, batch: int, steps: int, tokens_a_step: int, vocabulary: int, longest: int) -> Work:
        """Make the load that `load` names.

        Args:
            load: `decode`: `batch` prompts of 64 tokens, with output enough for the steps. `mixed`: 8 times as many,
                prompts of 64 to 511 tokens, 16 to 127 output tokens, so that prompts arrive among decodes. Else the
                path of a file with a JSON object a line: `prompt` (text) or `prompt_token_ids`, `max_tokens` (128).
            batch: requests that run together, at most.
            steps: steps that the recording needs.
            tokens_a_step: tokens that a request gets in a step, at most.
            vocabulary: size of the vocabulary from which prompts are drawn.
            longest: tokens of a request, prompt and output, at most.

        Raises:
            LoadError: there is no such load, or its file can't be read.
        """
        rng = random.Random(0)

        def prompt(length: int) -> tuple[int, ...]:
            return tuple(rng.randrange(min(100, vocabulary - 1), vocabulary) for _ in range(min(length, longest // 2)))

        if load == "decode":
            room = longest - min(PROMPT_TOKENS, longest // 2)
            requests = [Request(prompt(PROMPT_TOKENS), min(steps * tokens_a_step, room)) for _ in range(batch)]
            return cls(f"decode, batch {batch}", tuple(requests), batch)
        if load == "mixed":
            requests = []
            for _ in range(8 * batch):
                tokens = prompt(rng.randrange(64, 512))
                requests.append(Request(tokens, min(rng.randrange(16, 128), longest - len(tokens))))
            return cls(f"mixed, {batch} together", tuple(requests), batch)
        return cls(Path(load).name, _requests(load), batch)


def check_load(load: str) -> None:
    """Refuse a load that `Work.make` would refuse.

    Raises:
        LoadError: there is no such load, or its file can't be read.
    """
    if load not in ("decode", "mixed"):
        _requests(load)


def _requests(load: str) -> tuple[Request, ...]:
    path = Path(load)
    try:
        if not path.is_file():
            raise LoadError(f"--load is {load!r}, which is not a file; give decode, mixed, or a file of JSON lines")
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", error)
        raise LoadError(f"{load} can't be read ({why}); give a readable file in UTF-8") from None
    asked = tuple(_request(path, number, line) for number, line in enumerate(lines, 1) if line.strip())
    if not asked:
        raise LoadError(f"{load} is empty; give a JSON object a line, with prompt or prompt_token_ids")
    return asked


def _request(path: Path, number: int, line: str) -> Request:
    try:
        data: Any = json.loads(line)
        text = "prompt" in data
        prompt = data["prompt"] if text else tuple(_whole(token) for token in data["prompt_token_ids"])
        if not (isinstance(prompt, str) if text else prompt):
            raise ValueError
        return Request(prompt, _whole(data.get("max_tokens", 128)))
    except (ValueError, TypeError, KeyError):
        raise LoadError(
            f"line {number} of {path} is {line[:60]!r}; it must be a JSON object with prompt (text) or "
            "prompt_token_ids (numbers), and max_tokens (a number) if not 128"
        ) from None


def _whole(value: Any) -> int:
    if type(value) is int and value >= 0:
        return value
    raise ValueError
