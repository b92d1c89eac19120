"""Each detector of the suite is needed for its fault, which would pass without it."""

from collections.abc import Callable
from typing import Any

import compat_planted as planted
import pytest
from compat_checked import checked

from vllm_async_spec.audit import host_reads
from vllm_async_spec.compat import check as checking
from vllm_async_spec.compat import compare, simulated_device
from vllm_async_spec.compat.compare import Judgement
from vllm_async_spec.compat.simulated_device import SimulatedDevice


def without_operator(name: str) -> Callable[[pytest.MonkeyPatch], None]:
    kept = {operator: what for operator, what in host_reads._OPERATORS.items() if what != name}
    return lambda patch: patch.setattr(host_reads, "_OPERATORS", kept)


def without_method(name: str) -> Callable[[pytest.MonkeyPatch], None]:
    kept = {method: what for method, what in host_reads._READS.items() if what != name}
    return lambda patch: patch.setattr(host_reads, "_READS", kept)


def without(owner: Any, name: str, stands_there: Any) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patch: patch.setattr(owner, name, stands_there)


def deaf_to(*kinds: str) -> Callable[[pytest.MonkeyPatch], None]:
    heard = SimulatedDevice.waited

    def waited(self: SimulatedDevice, kind: Any, what: str) -> None:
        if what not in kinds:
            heard(self, kind, what)

    return lambda patch: patch.setattr(SimulatedDevice, "waited", waited)


def made_anywhere(self: Any, func: Any, args: Any, kwargs: dict[str, Any], on_device: bool) -> Any:
    return func(*args, **kwargs | {"device": "cpu"})


def changes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(checking, "_changed", lambda metadata, before: ())
    patch.setattr(checking, "against_model", lambda *arguments: ())


def never_wrong(one: Any, other: Any) -> Judgement:
    return Judgement.BOUNDED


# What is taken out, and the builder that then gets away with it.
DETECTORS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], type[planted.Builder]]] = {
    "item": (without_operator("item"), planted.Item),
    "nonzero": (without_operator("nonzero"), planted.Nonzero),
    "bincount": (without_operator("bincount"), planted.Bincount),
    "cpu": (without_method("cpu"), planted.CopiesToHost),
    "to": (without_method("to"), planted.MovesToHost),
    "repr": (without_method("repr"), planted.Print),
    "tolist": (without_method("tolist"), planted.ToList),
    "numpy": (without_method("numpy"), planted.Numpy),
    "unfenced copies": (without_method("numpy"), planted.UnfencedCopy),
    "masks": (without(host_reads, "_has_mask", lambda probe, indices: False), planted.Mask),
    "dynamic shapes": (without(host_reads, "_REPEATS", set()), planted.DynamicShape),
    "copies to the host": (deaf_to("copy_"), planted.CopiesIntoHostBuffer),
    "copies to the device": (deaf_to("copy_"), planted.BlockingFill),
    "to the device": (deaf_to("to"), planted.BlockingUpload),
    "data on the device": (without(simulated_device, "_FROM_DATA", set()), planted.TensorOfList),
    "indices on the host": (deaf_to("index on the host"), planted.HostIndex),
    "waits by name": (deaf_to("synchronize"), planted.WaitsForAnEvent),
    "the builder's memory": (without(simulated_device._Sides, "_make", made_anywhere), planted.OwnBuffer),
    "the batch's memory": (without(SimulatedDevice, "place", lambda self, tensor: tensor), planted.Item),
    "device values": (without(compare, "_judge", never_wrong), planted.BoundForTruth),
    "maxima": (without(compare, "_judge", never_wrong), planted.MaximumForTruth),
    "bounds": (without(compare, "_is_bounded", lambda exact, found: True), planted.TooSmall),
    "changes": (changes, planted.ChangesTheLengths),
    "changes of host lengths": (without(checking, "_changed", lambda metadata, before: ()), planted.ChangesTheBound),
}


@pytest.mark.parametrize("name", DETECTORS)
def test_without_its_detector_a_fault_would_pass(name: str, monkeypatch: pytest.MonkeyPatch):
    take_out, kind = DETECTORS[name]
    assert not checked(kind, kind.case).passed
    take_out(monkeypatch)
    assert checked(kind, kind.case).passed


def test_every_operator_and_method_that_reads_has_a_planted_builder():
    named = set(host_reads._OPERATORS.values()) | set(host_reads._READS.values())
    assert {what for kind in planted.PLANTED for what in named if f"({what})" in str(kind.fault)} == named
