"""The plugin's cost or gain against stock."""

from benchmarks.arms import Arm, Plan, Plugin
from benchmarks.loads import find_loads
from benchmarks.plans.engines import ACCEPTANCE, DEFAULT_ENGINE, tiny_arm
from benchmarks.shapes import find_shape


def overhead(shape: str) -> Plan:
    """The plugin's cost or gain on a GPU, with the first of the shape's drafters."""
    method = next(iter(find_shape(shape).drafters))
    return Plan(
        name=f"overhead-{shape}",
        about=f"The plugin on, off and not loaded, {shape} shape",
        arms=tuple(
            Arm(plugin.value, shape, plugin=plugin, method=method, acceptance=ACCEPTANCE, engine=DEFAULT_ENGINE)
            for plugin in Plugin
        ),
        loads=find_loads(("decode-1", "decode-8", "decode-32", "decode-128", "mixed")),
        turns=4,
        reference=Plugin.STOCK.value,
        control=Plugin.NOOP.value,
    )


def overhead_tiny() -> Plan:
    """The same on a CPU, where vLLM by default never schedules asynchronously with speculative decoding."""
    return Plan(
        name="overhead-tiny",
        about="The plugin on, off and not loaded, tiny shape on a CPU",
        arms=tuple(tiny_arm(plugin.value, plugin=plugin) for plugin in Plugin),
        loads=find_loads(("decode-1-short", "decode-4-short", "mixed-short")),
        turns=4,
        seconds=1.0,
        reference=Plugin.STOCK.value,
        control=Plugin.NOOP.value,
        keep=True,
    )
