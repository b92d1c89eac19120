"""From how many drafting requests on vLLM's steps have no CUDA graph."""

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_async_spec.vllm_plugin.graph_limit import graph_limit


def config(
    drafts: int | None = 5,
    captured: int | None = 498,
    mode: str = "FULL_AND_PIECEWISE",
    seqs: int = 1024,
    tokens: int = 8192,
) -> Any:
    return SimpleNamespace(
        speculative_config=None if drafts is None else SimpleNamespace(num_speculative_tokens=drafts),
        compilation_config=SimpleNamespace(
            max_cudagraph_capture_size=captured, cudagraph_mode=SimpleNamespace(name=mode)
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=seqs, max_num_batched_tokens=tokens),
    )


def test_a_batch_without_a_graph_is_named_with_its_remedy():
    assert graph_limit(config()) == (
        "steps of more than 83 requests with 5 drafts have no CUDA graph, which costs host time: vLLM captures up to "
        "498 tokens; if you expect more requests at once, give --max-cudagraph-capture-size, 6 tokens for each of them"
    )


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"seqs": 84}, True),
        ({"seqs": 83}, False),
        ({"tokens": 504}, True),  # no step has more than 84 requests with drafts
        ({"tokens": 503}, False),
        ({"drafts": 3, "captured": 512, "seqs": 128}, False),
        ({"drafts": 3, "captured": 512, "seqs": 129}, True),
        ({"drafts": None}, False),
        ({"mode": "NONE"}, False),
        ({"captured": 0}, False),
        ({"captured": None}, False),
    ],
)
def test_only_a_batch_that_can_run_counts(given: dict[str, Any], told: bool):
    assert (graph_limit(config(**given)) is not None) is told


def test_a_configuration_without_a_mode_has_no_graphs():
    without = config()
    without.compilation_config.cudagraph_mode = None
    assert graph_limit(without) is None
