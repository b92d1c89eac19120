"""How the decode loop of our own is asked for."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from vllm_async_spec.generation.compiling import Compile, compile_arguments

_KINDS: dict[str, tuple[type, ...]] = {"torch_compile": (object,), "memory_limit": (int, type(None))}
"""Types of the options that are not on or off; `compile_arguments` judges the first."""


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
    torch_compile: Compile = False
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
        return compile_arguments(self.torch_compile)

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
        if self.compiles_with is not None and not self.static_cache:
            raise ValueError(
                "torch_compile needs static_cache, because each length of another is compiled anew; "
                "leave out one of the two"
            )
        if self.memory_limit is not None and self.memory_limit < 1:
            raise ValueError(f"memory_limit is {self.memory_limit}; it must be at least 1 byte")
