"""Finds a patch's targets, and detects targets that a third party has replaced."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType, ModuleType

from vllm_async_spec.vllm_plugin.ledger.entries import PatchError, Target
from vllm_async_spec.vllm_plugin.ledger.fingerprint import module_file


def defines(module: ModuleType, qualname: str) -> bool:
    """Whether a module itself defines this class or function, and does not only import it."""
    owner = getattr(module, qualname.partition(".")[0], None)
    if getattr(owner, "__module__", None) != module.__name__:
        return False
    try:
        resolve(module, qualname)
    except AttributeError:
        return False
    return True


def resolve(module: ModuleType, qualname: str) -> object:
    """The class or function with this dotted name.

    Raises:
        AttributeError: the module has none of this name.
    """
    value: object = module
    for name in qualname.split("."):
        value = getattr(value, name)
    return value


def package_root(module: str) -> Path | None:
    """The directory that contains the top package of `module`, or None if that is not installed. Imports nothing."""
    top = module.partition(".")[0]
    loaded = sys.modules.get(top)
    try:
        spec = importlib.util.find_spec(top) if loaded is None else getattr(loaded, "__spec__", None)
        origin = getattr(loaded, "__file__", None) or getattr(spec, "origin", None)
    except (ImportError, ValueError):
        return None
    if origin is None:
        return None
    file = Path(origin)
    return file.parents[1] if file.name == "__init__.py" else file.parent


def source_file(module: str) -> Path | None:
    """The file of a module, found without importing the module or its package; None if there is none."""
    root = package_root(module)
    return None if root is None else module_file(root, module)


def refuse_third_party(module: ModuleType, target: Target) -> None:
    """Refuse a target that another plugin has replaced, because two plugins on one target would undo each other.

    Raises:
        PatchError: the target is not the object that its module's source defines.
    """
    value = _own(module, target.qualname)
    if not isinstance(value, type):
        if isinstance(value, property | functools.cached_property):
            raise PatchError(f"{target} has been replaced by a {type(value).__name__}; {_REMEDY}")
        for layer in _layers(value):
            _refuse_layer(layer, module, target)
        return
    for name, member in vars(value).items():
        for layer in _layers(member):
            # Members other than functions may be vLLM's own, and a dataclass's generated methods have no file.
            generated = isinstance(layer, FunctionType) and layer.__code__.co_filename == "<string>"
            if isinstance(layer, FunctionType) and not (generated and name.startswith("__")):
                _refuse_layer(layer, module, target)


def _own(module: ModuleType, qualname: str) -> object:
    """The object bound to the name, before the descriptor protocol makes a method or a property's value of it."""
    path, _, name = qualname.rpartition(".")
    return inspect.getattr_static(resolve(module, path) if path else module, name)


def _layers(value: object) -> Iterator[object]:
    """Yield the functions of a target, from the outermost decorator to the function that vLLM wrote.

    Any object other than a function or one of Python's own wrappers is yielded unchanged and ends the sequence.
    """
    while True:
        if isinstance(value, staticmethod | classmethod):
            value = value.__func__
        elif isinstance(value, property):
            value = value.fget
        elif isinstance(value, functools.cached_property):
            value = value.func
        elif isinstance(value, FunctionType | _CACHED):
            if isinstance(value, FunctionType):
                yield value
            if "__wrapped__" not in vars(value):
                return
            value = vars(value)["__wrapped__"]
        else:
            yield value
            return


def _refuse_layer(layer: object, module: ModuleType, target: Target) -> None:
    if not isinstance(layer, FunctionType):
        raise PatchError(f"{target} has been replaced by a {type(layer).__name__}; {_REMEDY}")
    file = layer.__code__.co_filename
    root, top = package_root(module.__name__), module.__name__.partition(".")[0]
    upstream = file == module.__file__ or (root is not None and file.startswith(f"{root / top}{os.sep}"))
    if not (upstream or file.startswith(_OURS) or Path(file).name in _DECORATORS):
        line = layer.__code__.co_firstlineno
        raise PatchError(f"{target} has been replaced by another plugin ({file}:{line}); {_REMEDY}")


_CACHED = type(functools.cache(lambda: None))
_REMEDY = "disable one of the two, with VLLM_PLUGINS or VLLM_ASYNC_SPEC=off"
_OURS = str(Path(__file__).resolve().parents[2]) + os.sep
# Files of decorators that vLLM itself uses, such as @deprecated, @contextmanager and @inference_mode.
_DECORATORS = {
    "typing_extensions.py",
    "warnings.py",
    "contextlib.py",
    "functools.py",
    "dataclasses.py",
    "reprlib.py",
    "_contextlib.py",
}
