"""Which lines and branches of a builder the suite's batches reached, and which of the others could wait.

coverage.py records what runs while a batch is built: in vLLM, in the plugin, and in the package of the builder's
author. PyTorch, NumPy and Python's library are left out. Every line that did not run is searched for expressions that
could wait: in the functions that ran, and in those that their other lines would call.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import coverage
from torch.overrides import TorchFunctionMode

from vllm_async_spec.audit.stack import short_path
from vllm_async_spec.compat.branches.calls import code_of, loaded_modules, target
from vllm_async_spec.compat.branches.could_wait import COULD_WAIT, HOST_LENGTHS, Suspect
from vllm_async_spec.compat.branches.source_lines import Function, Statement, functions_of
from vllm_async_spec.compat.device import Device
from vllm_async_spec.compat.simulated_device import HostDevice


@dataclass(frozen=True, slots=True)
class Unreached:
    """A line that could wait, and that no batch reached.

    Attributes:
        file: Its file, from the package's name on.
        what: How it could wait, such as `read (item)`.
        function: The function that it is in.
        called_from: `file:line` of the unreached call of that function; None if other lines of it ran.
    """

    file: str
    line: int
    source: str
    what: str
    function: str
    called_from: str | None = None

    def __str__(self) -> str:
        called = "" if self.called_from is None else f", called at {self.called_from}"
        return f"{self.file}:{self.line} in {self.function}{called}: {self.what}: {self.source}"


@dataclass(frozen=True, slots=True)
class Reached:
    """What the batches reached of a builder's `build` and of what it calls.

    Attributes:
        taken: Number of branches taken: a condition and a loop have two, a match one for each case.
        of: Number of all branches, in the functions that ran.
        lines: Lines not reached, in the functions that ran, by file.
        unreached: Lines not reached that could wait, also in functions that only lines not reached would call.
    """

    taken: int
    of: int
    lines: dict[str, tuple[int, ...]] = field(default_factory=dict)
    unreached: tuple[Unreached, ...] = ()

    @property
    def branches(self) -> str:
        """The share of branches, such as `31 of 44`."""
        return f"{self.taken} of {self.of}"

    def to_dict(self) -> dict[str, Any]:
        """As plain data, for JSON."""
        return {
            "branches": self.branches,
            "lines": {file: list(lines) for file, lines in self.lines.items()},
            "unreached": [str(each) for each in self.unreached],
        }


NOTHING_REACHED = Reached(0, 0)

_ENTRIES = ("build", "build_for_drafting", "arguments")
"""What the suite calls in a step. A batch for CUDA graph capture delays no step, so its own lines may wait."""
_CAPTURE = "build_for_cudagraph_capture"
_PACKAGE = Path(__file__).resolve().parents[2]
_OUR_PARTS = ("vllm_plugin", "attention", "kernels", "spec_decode")
"""The parts of this package that builders run. A host length is told where it is read, not where it is copied."""
_INSTALLED = tuple(os.path.realpath(sysconfig.get_path(name)) for name in ("purelib", "platlib", "stdlib"))
_LEFT_OUT = ("torch", "numpy", "triton", *sys.stdlib_module_names)


class Trace:
    """Records what runs while builders of one backend build batches."""

    def __init__(self) -> None:
        self._builders: dict[type, object] = {}
        self._places: tuple[str, ...] = ()
        self._coverage: coverage.Coverage | None = None
        self._called: set[tuple[str, int, str]] = set()
        self._can_wait = True

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Make `recorded` record here."""
        token = _ACTIVE.set(self)
        try:
            yield
        finally:
            _ACTIVE.reset(token)

    @contextlib.contextmanager
    def recording(self, builder: object, device: Device) -> Iterator[None]:
        """Record what `builder` runs on this thread.

        Calls of PyTorch are noted on a simulated device only, because that may disturb compilers. Only such a note can
        tell a call from a condition on the same line.
        """
        self._builders.setdefault(type(builder), builder)
        self._can_wait = not isinstance(device, HostDevice)
        if self._coverage is None:
            self._places = _places(type(builder))
            self._coverage = coverage.Coverage(
                data_file=None, branch=True, include=[each + "*" for each in self._places], config_file=False
            )
            # Nothing to record is a result: an adapter may be all in C.
            self._coverage.set_option("run:disable_warnings", ["no-data-collected", "trace-changed"])
        calls = contextlib.nullcontext() if device.validates_kernels else _Calls(self._places, self._called)
        with calls, self._coverage.collect():
            yield

    def result(self) -> Reached:
        """What has been reached so far."""
        if self._coverage is None:
            return NOTHING_REACHED
        data = self._coverage.get_data()
        ran = {
            file: _Ran(set(data.lines(file) or ()), _ways(data.arcs(file) or ()))
            for file in sorted(data.measured_files())
            if file.startswith(self._places)
        }
        functions = [(file, each) for file in ran for each in functions_of(file) if _is_within(each, ran[file].lines)]
        branches = [branch.taken(ran[file].ways) for file, each in functions for branch in each.branches]
        lines: dict[str, set[int]] = {}
        for file, function in functions:
            missed = {each.first for each in function.statements if not each.ran(ran[file].lines)}
            if missed:
                lines.setdefault(short_path(file), set()).update(missed)
        return Reached(
            sum(branches),
            len(branches),
            {file: tuple(sorted(numbers)) for file, numbers in lines.items()},
            tuple(self._unreached(functions, ran)) if self._can_wait else (),
        )

    def _unreached(self, functions: Sequence[tuple[str, Function]], ran: dict[str, _Ran]) -> Iterator[Unreached]:
        """The lines not reached that could wait: in these functions, then in what lines not reached call."""
        modules = {_realpath(file): module for file, module in loaded_modules().items()}
        waiting: list[tuple[str, Function, str | None]] = [(*each, None) for each in functions]
        waiting += [(file, each, None) for file, each in self._entries() if (file, each) not in functions]
        seen = {(file, function.first) for file, function, _ in waiting}
        while waiting:
            file, function, called_from = waiting.pop(0)
            lines = ran[file].lines if file in ran else set()
            if function.name.rpartition(".")[2] == _CAPTURE:
                continue
            for statement in function.statements:
                missed = [each for each in statement.suspects if not self._ran(each, file, lines)]
                yield from _told(missed, file, function, called_from)
                if statement.ran(lines):
                    continue
                for place, called in self._callees(statement, function, modules.get(file)):
                    if (place, called.first) not in seen:
                        seen.add((place, called.first))
                        waiting.append((place, called, f"{short_path(file)}:{statement.first}"))

    def _ran(self, suspect: Suspect, file: str, lines: set[int]) -> bool:
        numbers = range(suspect.first, suspect.last + 1)
        if suspect.guarded:
            return any((file, line, suspect.name) in self._called for line in numbers)
        return any(line in lines for line in numbers)

    def _entries(self) -> Iterator[tuple[str, Function]]:
        for name in _ENTRIES:
            for kind in self._builders:
                if (found := self._function(getattr(kind, name, None))) is not None:
                    yield found

    def _callees(
        self, statement: Statement, function: Function, module: ModuleType | None
    ) -> Iterator[tuple[str, Function]]:
        for call in statement.calls if module is not None else ():
            assert module is not None
            if (found := self._function(target(call, function, module, tuple(self._builders.values())))) is not None:
                yield found

    def _function(self, value: Any) -> tuple[str, Function] | None:
        """The file and the function that a function or its code is from, if it is in a recorded place."""
        code = value if hasattr(value, "co_firstlineno") else code_of(value)
        if code is None or not (file := _realpath(code.co_filename)).startswith(self._places):
            return None
        found = next((each for each in functions_of(file) if each.first == code.co_firstlineno), None)
        return None if found is None else (file, found)


_ACTIVE: contextvars.ContextVar[Trace | None] = contextvars.ContextVar("_ACTIVE", default=None)


def recorded(builder: object, device: Device) -> contextlib.AbstractContextManager[None]:
    """Record what `builder` runs in the context for the active trace; without an active trace do nothing."""
    trace = _ACTIVE.get()
    return contextlib.nullcontext() if trace is None else trace.recording(builder, device)


@dataclass(frozen=True, slots=True)
class _Ran:
    """What ran of one file."""

    lines: set[int]
    ways: dict[int, set[int]]


def _ways(arcs: Iterable[tuple[int, int]]) -> dict[int, set[int]]:
    """The lines that each line led to."""
    found: dict[int, set[int]] = {}
    for start, end in arcs:
        found.setdefault(start, set()).add(end)
    return found


class _Calls(TorchFunctionMode):
    """Notes file, line and name of each call of PyTorch that could wait, and of the lazy host length around the call.

    Args:
        places: What the paths of interesting files begin with.
        found: Where to note.
    """

    def __init__(self, places: tuple[str, ...], found: set[tuple[str, int, str]]) -> None:
        super().__init__()
        self._places = places
        self._found = found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in COULD_WAIT:
            self._note(name, sys._getframe(1))
        return func(*args, **(kwargs or {}))

    def _note(self, name: str, frame: FrameType | None) -> None:
        while frame is not None:
            file = _realpath(frame.f_code.co_filename)
            is_interesting = file.startswith(self._places)
            if is_interesting:
                self._found.add((file, frame.f_lineno, name))
            if frame.f_code.co_name in HOST_LENGTHS:
                name = frame.f_code.co_name  # for the line that reads the property
            elif is_interesting:
                return
            frame = frame.f_back


_realpath = functools.cache(os.path.realpath)


def _is_within(function: Function, lines: set[int]) -> bool:
    """Whether the function ran, or the function that it is defined in."""
    return function.ran(lines) or (function.outer is not None and _is_within(function.outer, lines))


def _told(suspects: Sequence[Suspect], file: str, function: Function, called_from: str | None) -> Iterator[Unreached]:
    """Each line once, with all that could wait there."""
    lines: dict[int, list[Suspect]] = {}
    for suspect in suspects:
        lines.setdefault(suspect.line, []).append(suspect)
    for line, found in lines.items():
        what = ", ".join(dict.fromkeys(each.what for each in found))
        yield Unreached(short_path(file), line, found[0].source, what, function.name, called_from)


def _places(builder: type) -> tuple[str, ...]:
    """Where to record: paths that the files begin with."""
    found = [str(_PACKAGE / part) + os.sep for part in _OUR_PARTS if f"vllm_async_spec.{part}" in sys.modules]
    names = [cls.__module__.partition(".")[0] for cls in builder.__mro__]
    for name in dict.fromkeys(["vllm", *names]):
        module = sys.modules.get(name)
        if module is None or name in (*_LEFT_OUT, _PACKAGE.name):
            continue
        if hasattr(module, "__path__"):
            found += [os.path.realpath(each) + os.sep for each in module.__path__]
        elif isinstance(file := getattr(module, "__file__", None), str):
            # A module that is not installed: with the modules beside it.
            folder = os.path.dirname(os.path.realpath(file))
            found.append(os.path.realpath(file) if folder in _INSTALLED else folder + os.sep)
    return tuple(found)
