"""vLLM's dummy loader, which then arranges the random weights so that drafts are accepted as often as requested.

The loader arranges, not the engine afterwards: many kernels repack weights after loading (vLLM's CPU platform does so
with every linear layer), and later writes into the originals have no effect.

Importing this module registers the loader; import it in the process that loads the model.
"""

from typing import Any

from torch import nn
from vllm.config import ModelConfig
from vllm.config.load import LoadConfig
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

from benchmarks.acceptance import arrange
from benchmarks.attentive_weights import make_attentive
from benchmarks.options import LOAD_FORMAT


@register_model_loader(LOAD_FORMAT)
class ArrangedLoader(DummyModelLoader):  # type: ignore[misc]  # vLLM is not typed where mypy looks
    """Takes from the extra config `share`, the probability of acceptance; `draft_model`, the draft model's directory;
    `attentive`, whether attention affects tokens too; `experts`, whether the target has them; and `head_scale` of
    `arrange`, if it is not 1."""

    def __init__(self, load_config: LoadConfig) -> None:
        self._options: dict[str, Any] = dict(load_config.model_loader_extra_config)
        BaseModelLoader.__init__(self, load_config)  # the class in between takes no options

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        super().load_weights(model, model_config)
        votes = model_config.model == self._options["draft_model"]
        scale = self._options.get("head_scale", 1.0)
        arrange(model, model_config.get_vocab_size(), self._options["share"], votes=votes, head_scale=scale)
        if self._options["attentive"]:
            ranks = get_tensor_model_parallel_world_size()
            make_attentive(
                model, model_config.get_vocab_size(), votes=votes, ranks=ranks, experts=self._options["experts"]
            )
