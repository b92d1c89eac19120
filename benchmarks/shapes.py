"""Models given by their sizes: the files that vLLM needs to run a model with random weights.

A directory with a `config.json` is enough: weights are dummies, prompts are token ids, and no tokenizer is loaded.
No shape ties its head to its embeddings, because the two are arranged differently (see `acceptance`). A step reads the
whole head and a few rows of the embeddings whether they are one matrix or two.
"""

import enum
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import configs
from benchmarks.mrope import ARCHITECTURE as MROPE_LLAMA


class Method(str, enum.Enum):
    """How drafts are made, by vLLM's names."""

    EAGLE = "eagle"
    EAGLE3 = "eagle3"
    DRAFT_MODEL = "draft_model"
    MTP = "mtp"
    NGRAM = "ngram"
    NGRAM_GPU = "ngram_gpu"
    SUFFIX = "suffix"


class ShapeError(ValueError):
    """A shape, or its drafter for a method, does not exist; the message names those that do."""


@dataclass(frozen=True, slots=True)
class Shape:
    name: str
    about: str
    parameters: float
    """Expected number of parameters; a test counts them."""
    target: Mapping[str, Any]
    """Its config.json."""
    drafters: Mapping[Method, Mapping[str, Any] | None]
    """A config.json for each method; None if the target's own directory holds the drafter, or no drafter is needed."""

    @property
    def expert_parameters(self) -> int:
        """Parameters of the target's routed experts: three matrices each, in every layer after the dense ones."""
        names = ("num_experts", "n_routed_experts", "num_local_experts")
        experts: int = next((self.target[name] for name in names if name in self.target), 0)
        if experts < 2:
            return 0
        layers = max(self.target["num_hidden_layers"] - self.target.get("first_k_dense_replace", 0), 0)
        width = self.target.get("moe_intermediate_size") or self.target["intermediate_size"]
        found: int = layers * experts * 3 * self.target["hidden_size"] * width
        return found

    @property
    def has_linear_attention(self) -> bool:
        """Whether some layers keep a state for each request, as a hybrid's do."""
        return "linear_key_head_dim" in self.target


@dataclass(frozen=True, slots=True)
class Models:
    """Directories that vLLM takes for models."""

    target: Path
    drafter: Path | None


def write_models(shape: Shape, method: Method | None, folder: Path) -> Models:
    """Write the directories of `shape` for drafting by `method` (None: no drafting) into `folder`.

    Raises:
        ShapeError: this shape has no such drafter.
    """
    target = _write(folder / shape.name / "target", shape.target)
    if method is None:
        return Models(target, None)
    if method not in shape.drafters:
        known = ", ".join(known.value for known in shape.drafters)
        raise ShapeError(f"shape {shape.name!r} has no drafter for {method.value!r}; it has {known}")
    config = shape.drafters[method]
    return Models(target, _write(folder / shape.name / method.value, config) if config else target)


def find_shape(name: str) -> Shape:
    """The shape of this name.

    Raises:
        ShapeError: no shape has this name.
    """
    if name not in SHAPES:
        raise ShapeError(f"there is no shape {name!r}; there are {', '.join(SHAPES)}")
    return SHAPES[name]


def _write(folder: Path, config: Mapping[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return folder


_NO_DRAFTER: dict[Method, Mapping[str, Any] | None] = dict.fromkeys((Method.NGRAM, Method.NGRAM_GPU, Method.SUFFIX))
"""Methods that draft without a model."""


def _one_layer(config: Mapping[str, Any]) -> dict[str, Any]:
    """The EAGLE drafter of a Llama: the same model with one layer."""
    return {**config, "num_hidden_layers": 1}


def _llama_shape(name: str, about: str, parameters: float, target: Mapping[str, Any]) -> Shape:
    # Keys and values as wide as the hidden state, so that attention can copy an embedding.
    eagle3 = _one_layer(target) | {"num_key_value_heads": target["num_attention_heads"]}
    drafters: dict[Method, Mapping[str, Any] | None] = {
        Method.EAGLE: _one_layer(target),
        Method.EAGLE3: eagle3,
        Method.DRAFT_MODEL: configs.small_llama(target["vocab_size"]),
    }
    return Shape(name, about, parameters, target, drafters | _NO_DRAFTER)


SHAPES = {
    shape.name: shape
    for shape in (
        _llama_shape("1b", "Llama-3.2-1B with a head of its own", 1.50e9, configs.LLAMA_1B),
        _llama_shape("8b", "Llama-3-8B", 8.03e9, configs.LLAMA_8B),
        Shape(
            "moe",
            "Qwen3-30B-A3B with a third of its layers and half of its experts",
            5.76e9,
            configs.QWEN3_MOE,
            {Method.EAGLE: configs.QWEN3_MOE_EAGLE, Method.DRAFT_MODEL: configs.small_llama(151_936)},
        ),
        Shape(
            "gpt-oss",
            "gpt-oss-20b with a third of its layers, in bfloat16",
            7.53e9,
            configs.GPT_OSS,
            {Method.EAGLE: configs.GPT_OSS_EAGLE},
        ),
        Shape(
            "hybrid",
            "Qwen3-Next with a quarter of its layers and an eighth of its experts",
            3.46e9,
            configs.QWEN3_NEXT,
            {Method.MTP: None},
        ),
        Shape("a3b", "Qwen3-30B-A3B", 30.5e9, configs.QWEN3_30B_A3B, {Method.EAGLE: configs.QWEN3_MOE_EAGLE}),
        Shape(
            "mla",
            "DeepSeek-V2-Lite's sizes in DeepSeek-V3's architecture, with one prediction layer",
            15.7e9,
            configs.DEEPSEEK_LITE,
            {Method.MTP: None},
        ),
        Shape(
            "mla-dense",
            "the same without experts, its prediction layer too",
            2.60e9,
            configs.DEEPSEEK_DENSE,
            {Method.MTP: None},
        ),
        Shape(
            "local",
            "Llama 4's chunked local attention in a dense model of eight layers",
            0.191e9,
            configs.LOCAL,
            {Method.DRAFT_MODEL: configs.small_llama(32_000)},
        ),
        Shape(
            "tiny",
            "a Llama for tests on a CPU",
            0.558e6,
            configs.TINY,
            {
                Method.EAGLE: _one_layer(configs.TINY),
                Method.EAGLE3: configs.TINY_EAGLE3,
                Method.DRAFT_MODEL: configs.TINY_DRAFT,
            }
            | _NO_DRAFTER,
        ),
        Shape(
            "tiny-text",
            "the same with a byte for each token",
            0.366e6,
            configs.TINY | configs.TEXT,
            {
                Method.EAGLE: _one_layer(configs.TINY | configs.TEXT),
                Method.DRAFT_MODEL: configs.TINY_DRAFT | configs.TEXT,
                Method.NGRAM: None,
                Method.NGRAM_GPU: None,
            },
        ),
        Shape(
            "tiny-mrope",
            "the same with positions of three axes",
            0.558e6,
            configs.TINY | configs.MROPE | {"architectures": [MROPE_LLAMA]},
            {Method.EAGLE: _one_layer(configs.TINY | configs.MROPE)},
        ),
        Shape("tiny-moe", "the same of moe", 1.72e6, configs.TINY_MOE, {Method.EAGLE: configs.TINY_MOE_EAGLE}),
        Shape(
            "tiny-gpt-oss", "the same of gpt-oss", 4.08e6, configs.TINY_GPT_OSS, {Method.EAGLE: configs.TINY_MOE_EAGLE}
        ),
        Shape("tiny-hybrid", "the same of hybrid", 3.37e6, configs.TINY_HYBRID, {Method.MTP: None}),
        Shape("tiny-mla", "the same of mla", 3.22e6, configs.TINY_MLA, {Method.MTP: None}),
        Shape("tiny-mtp", "the same without experts", 2.92e6, configs.TINY_MTP, {Method.MTP: None}),
    )
}
