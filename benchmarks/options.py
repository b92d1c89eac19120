"""Arguments of vLLM for an arm's model, its drafter and their random weights."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.arms import tensor_ranks
from benchmarks.facts import EngineError
from benchmarks.shapes import Method, find_shape, write_models

LOAD_FORMAT = "arranged"
"""The load format that `loader` registers."""
EXTENSION = "benchmarks.worker.BenchWorker"
"""The class that vLLM adds to its worker's."""


def model_options(arm: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Arguments for the model of `arm`, given as plain data, whose directories are written into `folder`.

    Raises:
        EngineError: weights can't be arranged for this arm.
        ShapeError: there is no such shape or drafter.
    """
    method = Method(arm["method"]) if arm["method"] else None
    shape = find_shape(arm["shape"])
    models = write_models(shape, method, folder)
    options: dict[str, Any] = {"model": str(models.target), "load_format": "dummy"}
    acceptance = arm["acceptance"]
    if acceptance and acceptance["means"] != "sampler":
        if tensor_ranks(arm["engine"]) > 1 and method is Method.EAGLE3:
            raise EngineError(
                "the layer of an EAGLE-3 drafter is not arranged across tensor-parallel ranks; run with "
                "tensor_parallel_size=1, or take another method than EAGLE-3"
            )
        options["load_format"] = LOAD_FORMAT
        draft_model = str(models.drafter) if method is Method.DRAFT_MODEL else None
        options["model_loader_extra_config"] = {
            "share": acceptance["share"],
            "draft_model": draft_model,
            "attentive": acceptance["means"] == "attentive",
            "experts": shape.expert_parameters > 0,
        }
    if method is None:
        return options
    drafting: dict[str, Any] = {"method": method.value, "num_speculative_tokens": arm["draft_tokens"]}
    if models.drafter != models.target:
        drafting["model"] = str(models.drafter)
    if method in (Method.NGRAM, Method.NGRAM_GPU):
        drafting |= {"prompt_lookup_min": 2, "prompt_lookup_max": 3}
    return options | {"speculative_config": drafting}
