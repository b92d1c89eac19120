"""How the decode loop of our own is asked for."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

_KINDS: dict[str, tuple[type, ...]] = {"torch_compile": (bool, str, dict), "memory_limit": (int, type(None))}
"""Types of the options that are not on or off."""
_COMPILES_WITH = ("backend", "fullgraph", "mode", "options")
_CAPTURING_MODES = ("reduce-overhead", "max-autotune")
"""Modes of `torch.compile` that make CUDA graphs, which know nothing of the streams of two slots."""


@dataclass(frozen=True, slots=True)
class DecodeSwitches:
    """Options of `generate(interleaved=...)`.

    Raises:
        ValueError: two of them contradict each other, or a value is out of range.
    """

    interleaved: bool
    """Whether a step is launched before the stop flags of the one before are read."""
    static_cache: bool = True
    """Whether keys and values are written to memory that is allocated once."""
    cuda_graphs: bool = True
    """Whether a step is captured and then replayed, by one launch."""
    torch_compile: bool | str | dict[str, Any] = False
    """Whether the model's forward is compiled; a name chooses the backend, a dict has arguments of `torch.compile`."""
    memory_limit: int | None = None
    """Bytes that may be held between generations."""

    @classmethod
    def of(cls, interleaved: bool | None, **chosen: Any) -> DecodeSwitches | None:
        """The switches of a call, None where it asks for transformers' own loop.

        Raises:
            ValueError: see the class; or an option is given to a loop that has not got it.
        """
        given = {name: value for name, value in chosen.items() if value is not None}
        if interleaved is None:
            if given:
                name, value = next(iter(given.items()))
                raise ValueError(
                    f"{name} is {value!r}, and transformers' own loop has no such option; "
                    "pass interleaved=True or interleaved=False too"
                )
            return None
        static = bool(given.get("static_cache", True))
        return cls(interleaved, **{"cuda_graphs": static, **given})

    @property
    def compiles_with(self) -> dict[str, Any] | None:
        """Arguments of `torch.compile`, None where nothing is compiled."""
        if isinstance(self.torch_compile, dict):
            return dict(self.torch_compile)
        if not self.torch_compile:
            return None
        return {"backend": "inductor" if self.torch_compile is True else self.torch_compile}

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            kinds = _KINDS.get(each.name, (bool,))
            if not isinstance(value, kinds):
                raise ValueError(f"{each.name} is {value!r}; it must be {' or '.join(kind.__name__ for kind in kinds)}")
        if self.cuda_graphs and not self.static_cache:
            raise ValueError(
                "cuda_graphs needs static_cache, because a captured step writes to the same memory each time; "
                "leave out one of the two"
            )
        if isinstance(self.torch_compile, dict):
            _refuse_arguments(self.torch_compile)
        if self.compiles_with is not None and not self.static_cache:
            raise ValueError(
                "torch_compile needs static_cache, because each length of another is compiled anew; "
                "leave out one of the two"
            )
        if self.memory_limit is not None and self.memory_limit < 1:
            raise ValueError(f"memory_limit is {self.memory_limit}; it must be at least 1 byte")


def _refuse_arguments(chosen: dict[str, Any]) -> None:
    """Refuse arguments of `torch.compile` that a step can't be compiled with."""
    for name in chosen:
        if name not in _COMPILES_WITH:
            raise ValueError(f"torch_compile has {name!r}; it may have {', '.join(_COMPILES_WITH)}")
    mode, options = chosen.get("mode"), chosen.get("options")
    if mode is not None and options is not None:
        raise ValueError(
            f"torch_compile has the mode {mode!r} and options, and PyTorch takes one of them; leave out one"
        )
    if mode in _CAPTURING_MODES or (options or {}).get("triton.cudagraphs"):
        raise ValueError(
            f"torch_compile is {chosen!r}, which makes CUDA graphs of its own, and here steps are captured; "
            "for what else it does take the mode 'max-autotune-no-cudagraphs'"
        )
