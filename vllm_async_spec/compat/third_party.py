"""Third-party builders, named on the command line as `module:name`.

The name may be a builder class that takes some of vLLM's four arguments, a backend class with `get_builder_cls`, an
adapter, or a factory: a function that is given a `BuilderInputs` and returns a builder. If a backend class also has
`get_impl_cls`, the suite runs its attention too.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import sys
from collections.abc import Callable
from typing import Any

from vllm_async_spec.compat.builder_inputs import BuilderInputs, SubjectError
from vllm_async_spec.compat.cases import BLOCK_SIZE, MetadataFactory, our_metadata, release_metadata
from vllm_async_spec.compat.check import failure_sentence
from vllm_async_spec.compat.device import Device
from vllm_async_spec.compat.error_text import message_of, printable
from vllm_async_spec.compat.layer import NOT_TINY, NOTHING_COMPILED, ImplLayer, Layer
from vllm_async_spec.compat.model_shapes import TINY, Model
from vllm_async_spec.compat.subject import Subject
from vllm_async_spec.compat.vllm_source import loaded_source

_FACTORY = (
    "name a factory instead, `module:function`, which is given a vllm_async_spec.compat.builder_inputs.BuilderInputs"
)
_GIVEN = ("kv_cache_spec", "layer_names", "vllm_config", "device")
"""The arguments from which vLLM makes every builder."""
_VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def is_third_party(name: str) -> bool:
    """Whether `name` is `module:name`, rather than the name of a vLLM backend."""
    return ":" in name


def third_party_subject(name: str, device: Device, model: Model = TINY) -> Subject:
    """Describe the builder `module:name` for `check`; it is made once, to see what it is and what it asks for.

    A subclass of a vLLM class gets vLLM's metadata, any other builder this package's.

    Raises:
        SubjectError: The module or the name does not exist, or makes no builder.
    """
    named = _resolve(name)
    target = named.get_builder_cls() if hasattr(named, "get_builder_cls") else named
    asked: list[str] = []
    make = _maker(name, target, model, asked)
    metadata, source = _metadata_for(target if inspect.isclass(target) else type(make(device)))
    if inspect.isclass(target):
        with contextlib.suppress(SubjectError):  # `check` makes the builder again, and tells the failure
            make(device)
    layer = _layer(named) if model is TINY else NOT_TINY
    return Subject(name, make, metadata, source, backend=named, layer=layer, model=model.name if asked else "")


def _layer(named: Any) -> Callable[[Any, Device], Layer] | str:
    if not hasattr(named, "get_impl_cls"):
        return "only the builder was given; name a backend class with get_impl_cls, which has the forward"
    source = loaded_source()
    if source is not None and not source.installed:
        return NOTHING_COMPILED
    return lambda builder, device: ImplLayer(named, builder, device, BLOCK_SIZE)


def _resolve(name: str) -> Any:
    module_name, _, qualname = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` does
    try:
        value: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = f"there is no module {error.name!r}"
        needed_by = "" if error.name == module_name else f", which {module_name} imports"
        raise SubjectError(f"{name}: {missing}{needed_by}; install the module, or start in its directory") from None
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise SubjectError(f"{name}: importing {module_name} fails: {failure_sentence(error)}") from None
    for part in qualname.split("."):
        if not hasattr(value, part):
            raise SubjectError(
                f"{name}: {module_name} has no {qualname!r}; name a builder class or a factory in that module"
            )
        value = getattr(value, part)
    return value


def _maker(name: str, target: Any, model: Model, asked: list[str]) -> Callable[[Device], Any]:
    if inspect.isclass(target):
        if not hasattr(target, "build") and not hasattr(target, "arguments"):
            raise SubjectError(
                f"{name}: {target.__name__} has no build(); name a metadata builder, a backend or a factory"
            )
        return lambda device: _construct(target, BuilderInputs(device.device, model, asked))
    if hasattr(target, "arguments"):
        return lambda device: target
    if not callable(target):
        raise SubjectError(
            f"{name} is of type {type(target).__name__}, which makes no builder; name a class or a factory"
        )
    return lambda device: _call_factory(name, target, BuilderInputs(device.device, model, asked))


def _call_factory(name: str, factory: Callable[[BuilderInputs], Any], setting: BuilderInputs) -> Any:
    try:
        builder = factory(setting)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise SubjectError(f"{name}: the factory fails: {failure_sentence(error)}") from error
    if not hasattr(builder, "build") and not hasattr(builder, "arguments"):
        raise SubjectError(f"{name}: the factory returned {type(builder).__name__}, which has no build()")
    return builder


def _construct(cls: type[Any], setting: BuilderInputs) -> Any:
    """Make the builder as vLLM does; an error names the argument or attribute that is missing."""
    signature = inspect.signature(cls)
    parameters = list(signature.parameters.values())
    passes_on = any(each.kind in _VARIABLE for each in parameters)
    required = [each.name for each in parameters if each.default is each.empty and each.kind not in _VARIABLE]
    more = [each for each in required if each not in _GIVEN]
    # vLLM gives all four by position, whatever their names; a builder for other engines may take some by name.
    some = set(required) < set(_GIVEN) and all(each.kind is not each.VAR_POSITIONAL for each in parameters)
    positional = not some and _binds(signature)
    if more and not positional:
        wanted = ", ".join(more)
        raise SubjectError(f"its constructor also wants {wanted}, which vLLM does not give; {_FACTORY}")
    wanted_names = _GIVEN if passes_on else required
    try:
        given: dict[str, Any] = {"device": setting.device}
        if positional or set(wanted_names) - given.keys():
            given = dict(zip(_GIVEN, setting.arguments(), strict=True))
    except ImportError as error:
        said = printable(message_of(error))
        raise SubjectError(f"its constructor needs vLLM's configuration, and {said}; {_FACTORY}") from error
    try:
        return cls(*given.values()) if positional else cls(**{each: given[each] for each in wanted_names})
    except AttributeError as error:
        asked = f"asked {type(error.obj).__name__} for {error.name!r}, which it does not have"
        raise SubjectError(f"its constructor {asked} ({failure_sentence(error)}); {_FACTORY}") from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise SubjectError(f"its constructor fails: {failure_sentence(error)}; {_FACTORY}") from error


def _binds(signature: inspect.Signature) -> bool:
    try:
        signature.bind(*_GIVEN)
    except TypeError:
        return False
    return True


def _metadata_for(cls: type[Any]) -> tuple[MetadataFactory, str]:
    if all(base.__module__.partition(".")[0] != "vllm" for base in inspect.getmro(cls)):
        return our_metadata(), "vllm-async-spec"
    import vllm

    return release_metadata(), f"vLLM {vllm.__version__}"
