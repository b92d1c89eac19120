"""`VLLM_ASYNC_SPEC=strict`: a refusal ends the start, also where somebody swallows the first error."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from types import ModuleType

from vllm_async_spec.vllm_plugin.ledger.import_hook import when_imported
from vllm_async_spec.vllm_plugin.settings import MODE

_ENGINE = "vllm.v1.engine.core"


class StrictError(SystemExit):
    """A patch was refused under `VLLM_ASYNC_SPEC=strict`.

    It ends the process with its sentence and no traceback. As a `SystemExit` it passes the `except Exception` of code
    that tries an import and goes on without it.
    """

    def __init__(self, message: str) -> None:
        super().__init__(f"vllm-async-spec: {message}")


class Strictness:
    """Remembers the first refusal, and refuses again wherever the start goes on in spite of it."""

    def __init__(self) -> None:
        self._refusal: str | None = None

    def watch(self, modules: Iterable[str]) -> None:
        """Refuse again as each of these is imported, and before any engine is made."""
        for module in modules:
            when_imported(module, lambda _: self.insist())
        when_imported(_ENGINE, self._guard_engine)

    def refuse(self, patch: str, why: str) -> None:
        """End the start.

        Raises:
            StrictError: always.
        """
        if self._refusal is None:
            self._refusal = (
                f"{patch} was refused: {why}; {MODE}=auto runs stock vLLM for it, {MODE}=off runs stock vLLM for "
                "everything"
            )
        self.insist()

    def insist(self) -> None:
        """End the start again, if a patch was refused.

        Raises:
            StrictError: one was.
        """
        if self._refusal is not None:
            raise StrictError(self._refusal)

    def _guard_engine(self, module: ModuleType) -> None:
        engine = getattr(module, "EngineCore", None)
        if not isinstance(engine, type):
            return  # then nothing can start here that would be the engine we know
        start = engine.__init__  # type: ignore[misc]

        @functools.wraps(start)
        def __init__(core: object, *args: object, **kwargs: object) -> None:
            self.insist()
            start(core, *args, **kwargs)

        engine.__init__ = __init__  # type: ignore[misc]
