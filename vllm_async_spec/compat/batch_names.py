"""Names of batches in tables, where a builder is tried with the numbers of several models."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Grouped = dict[str, list[str]]
"""Names of batches by the sentence that is true of them."""


def grouped_batches(pairs: Iterable[tuple[str, Mapping[str, Any]]], batches: Sequence[Mapping[str, Any]]) -> Grouped:
    """Names of the batches that each sentence is about, by sentence; batches are as `compat --json` writes them.

    A name is followed by the models, unless the sentence is true of all its models.
    """
    found: dict[str, dict[str, list[str]]] = {}
    for sentence, case in pairs:
        models = found.setdefault(sentence, {}).setdefault(case["case"], [])
        if case.get("model", "") not in models:
            models.append(case.get("model", ""))
    count = Counter(case["case"] for case in batches)
    return {
        sentence: [
            name if len(models) == count[name] else f"{name} ({', '.join(models)})" for name, models in cases.items()
        ]
        for sentence, cases in found.items()
    }
