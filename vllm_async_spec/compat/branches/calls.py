"""Which functions a call in source would reach, found by the names in the loaded modules, without calling anything."""

from __future__ import annotations

import ast
import functools
import inspect
import sys
from collections.abc import Sequence
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from vllm_async_spec.compat.branches.source_lines import Function

_NOTHING = object()


def target(call: ast.Call, function: Function, module: ModuleType, instances: Sequence[object]) -> CodeType | None:
    """Find the code that a call in `function` of `module` runs, where `instances`, the builders, may be its `self`.

    None if the names don't tell, as for an item of a list, or if it is not Python.
    """
    return code_of(_value(call.func, function, module, instances))


def code_of(value: Any) -> CodeType | None:
    """The code of a function, a method or a class's `__init__`, behind any decorators; None if it has none."""
    if isinstance(value, functools.partial):
        return code_of(value.func)
    if inspect.isclass(value):
        value = inspect.getattr_static(value, "__init__", None)
    if isinstance(value, staticmethod | classmethod | MethodType):
        value = value.__func__
    if callable(value) and not isinstance(value, FunctionType):
        value = inspect.getattr_static(value, "__wrapped__", value)
    value = inspect.unwrap(value) if isinstance(value, FunctionType) else value
    return value.__code__ if isinstance(value, FunctionType) else None


def loaded_modules() -> dict[str, ModuleType]:
    """The modules of this process by `__file__`."""
    modules = [module for module in list(sys.modules.values()) if isinstance(module, ModuleType)]
    return {file: module for module in modules if isinstance(file := vars(module).get("__file__"), str)}


def _value(node: ast.expr, function: Function, module: ModuleType, instances: Sequence[object]) -> Any:
    """What an expression of names and attributes means; `_NOTHING` if that can't be told."""
    if isinstance(node, ast.Name):
        if node.id in ("self", "cls"):
            return _self(function, module, instances)
        return _imported(node.id, function, module)
    if not isinstance(node, ast.Attribute):
        return _NOTHING
    if isinstance(node.value, ast.Call) and isinstance(node.value.func, ast.Name) and node.value.func.id == "super":
        return _above(node.attr, function, module, instances)
    owner = _value(node.value, function, module, instances)
    # Static, because a property would run.
    return _NOTHING if owner is _NOTHING else inspect.getattr_static(owner, node.attr, _NOTHING)


def _imported(name: str, function: Function, module: ModuleType) -> Any:
    where: Function | None = function
    while where is not None:
        if name in where.imports:
            source, attribute = where.imports[name]
            found = sys.modules.get(source)
            return found if attribute is None or found is None else vars(found).get(attribute, _NOTHING)
        where = where.outer
    return vars(module).get(name, _NOTHING)


def _self(function: Function, module: ModuleType, instances: Sequence[object]) -> Any:
    """The first of `instances` whose class has the method, else the class of the method."""
    owner = _owner(function, module)
    if not inspect.isclass(owner):
        return _NOTHING
    return next((each for each in instances if isinstance(each, owner)), owner)


def _above(name: str, function: Function, module: ModuleType, instances: Sequence[object]) -> Any:
    owner = _owner(function, module)
    if not inspect.isclass(owner):
        return _NOTHING
    instance = next((each for each in instances if isinstance(each, owner)), None)
    order = inspect.getmro(owner if instance is None else type(instance))
    later = order[order.index(owner) + 1 :]
    return next((vars(cls)[name] for cls in later if name in vars(cls)), _NOTHING)


def _owner(function: Function, module: ModuleType) -> Any:
    """The class that a method is in, also for a function defined in a method."""
    while function.outer is not None:
        function = function.outer
    value: Any = module
    for part in function.name.split(".")[:-1]:
        value = vars(value).get(part, _NOTHING)
    return _NOTHING if value is module else value
