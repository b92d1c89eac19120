"""What `--backend module:name` may name, and mistakes in it."""

import sys
from typing import Any

import compat_planted

from vllm_async_spec.attention import FlashAttentionAdapter
from vllm_async_spec.compat.builder_inputs import BuilderInputs

adapter = FlashAttentionAdapter()
number = 3


class Backend:
    @staticmethod
    def get_builder_cls() -> type[Any]:
        return compat_planted.Clean


def factory(setting: BuilderInputs) -> Any:
    return compat_planted.Clean(setting.device)


def broken_factory(setting: BuilderInputs) -> Any:
    raise KeyError("heads")


def empty_factory(setting: BuilderInputs) -> Any:
    return None


class WantsMore(compat_planted.Clean):
    def __init__(self, device: Any, metadata_cls: Any, *, table_width: int) -> None:
        super().__init__(device)


class AsksForMore(compat_planted.Clean):
    def __init__(self, device: Any) -> None:
        super().__init__(device)
        print(device.number_of_heads)


class Breaks(compat_planted.Clean):
    def __init__(self, device: Any) -> None:
        raise ValueError("no heads")


class Exits(compat_planted.Clean):
    def __init__(self, device: Any) -> None:
        sys.exit(0)


class TakesAll(compat_planted.Clean):
    def __init__(self, *arguments: Any) -> None:
        *_, device = arguments
        super().__init__(device)


class Renames(TakesAll):
    def __init__(self, spec: Any, layers: Any, config: Any, where: Any, /, more: int = 0) -> None:
        super().__init__(spec, layers, config, where)


class NoBuilder:
    pass


class WaitsWithManyHeads(compat_planted.Builder):
    def __init__(self, device: Any, heads: int) -> None:
        super().__init__(device)
        self.heads = heads

    def extra(self, metadata: Any) -> Any:
        return metadata.seq_lens.cpu() if self.heads >= 64 else None


def many_heads(setting: BuilderInputs) -> Any:
    config: Any = setting.vllm_config()
    return WaitsWithManyHeads(setting.device, config.model_config.get_num_attention_heads(config.parallel_config))
