"""`VLLM_ASYNC_SPEC=strict`: a refusal ends the start-up, even if other code swallows the first error."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from types import ModuleType

from vllm_async_spec.vllm_plugin.ledger.import_hook import when_imported
from vllm_async_spec.vllm_plugin.settings import MODE

_ENGINE = "vllm.v1.engine.core"


class StrictError(SystemExit):
    """A patch was refused under `VLLM_ASYNC_SPEC=strict`.

    The process ends with one sentence and no traceback. A `SystemExit` passes through the `except Exception` around
    optional imports.
    """

    def __init__(self, message: str) -> None:
        super().__init__(f"vllm-async-spec: {message}")


class Strictness:
    """Remembers the first refusal, and raises again whenever the start-up goes on in spite of it."""

    def __init__(self) -> None:
        self._refusal: str | None = None

    def watch(self, modules: Iterable[str]) -> None:
        """After a refusal, raise again when one of these modules is imported and before an engine is made."""
        for module in modules:
            when_imported(module, lambda _: self.insist())
        when_imported(_ENGINE, self._guard_engine)

    def refuse(self, patch: str, why: str) -> None:
        """End the start-up.

        Raises:
            StrictError: always.
        """
        if self._refusal is None:
            self._refusal = (
                f"{patch} was refused: {why}; {MODE}=auto runs stock vLLM for this patch, {MODE}=off runs stock vLLM "
                "for all patches"
            )
        self.insist()

    def insist(self) -> None:
        """End the start-up if a patch was refused.

        Raises:
            StrictError: a patch was refused.
        """
        if self._refusal is not None:
            raise StrictError(self._refusal)

    def _guard_engine(self, module: ModuleType) -> None:
        engine = getattr(module, "EngineCore", None)
        if not isinstance(engine, type):
            return  # without this class, no known engine can start here
        start = engine.__init__  # type: ignore[misc]

        @functools.wraps(start)
        def __init__(core: object, *args: object, **kwargs: object) -> None:
            self.insist()
            start(core, *args, **kwargs)

        engine.__init__ = __init__  # type: ignore[misc]
