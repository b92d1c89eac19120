"""The V1 runner of vLLM 0.19 to 0.29 with and without the plugin, and the V2 runner of the same release beside it."""

from collections.abc import Iterator
from functools import partial
from typing import Any

from benchmarks.arms import Arm, Plan, Plugin
from benchmarks.loads import find_loads
from benchmarks.plans.engines import ACCEPTANCE, BESIDE_OTHERS, DEFAULT_ENGINE, TRITON_PREFILL
from benchmarks.shapes import find_shape

_FITS_BESIDE = 10e9
"""Parameters of the largest shape of which four engines fit on one H200."""
_CACHE = {
    "hybrid": {"kv_cache_memory_bytes": 12 << 30},
    "moe": {"kv_cache_memory_bytes": 2 << 30},
    "gpt-oss": {"kv_cache_memory_bytes": 2 << 30},
}
"""Caches that are not of the usual size. A request of the hybrid takes 72 MiB for the states of its drafts;
the others' heads are few."""
_WITHOUT_V2 = {"hybrid"}
"""Shapes that vLLM's V2 runner does not serve."""
_PLANNED = (
    *((shape, "0.26.0") for shape in ("1b", "8b", "moe", "a3b", "gpt-oss", "hybrid")),
    *(("1b", release) for release in ("0.20.2", "0.22.1", "0.24.0", "0.28.0")),
)
_HAVE_V2 = {"0.26.0", "0.28.0"}
"""Releases whose default for dense models is the V2 runner."""


def v1_runner() -> Iterator[Plan]:
    """For each shape and release the V1 runner with the plugin on, off and not loaded, and audits of on and off; and
    where vLLM has one for it, the V2 runner. All with FLASH_ATTN, and at vLLM's defaults unless the name says more."""
    for shape, release in _PLANNED:
        yield _v1_runner(shape, release)


def _v1_runner(shape: str, release: str) -> Plan:
    model = find_shape(shape)
    beside = model.parameters <= _FITS_BESIDE
    engine: dict[str, Any] = DEFAULT_ENGINE | {"attention_backend": "FLASH_ATTN"}
    if beside:
        engine |= BESIDE_OTHERS | _CACHE.get(shape, {})
    suffix, kernels = "", ""
    if model.has_linear_attention:
        engine |= TRITON_PREFILL
        suffix, kernels = "-triton", ", Triton's kernels for prefills of linear attention"
    method = next(iter(model.drafters))
    arm = partial(Arm, shape=shape, release=release, method=method, acceptance=ACCEPTANCE, engine=engine)
    arms = [arm(plugin.value, plugin=plugin, runner="V1") for plugin in Plugin]
    about = f"vLLM {release}: the V1 runner with the plugin on, off and not loaded"
    if release in _HAVE_V2 and shape not in _WITHOUT_V2:
        arms.append(arm("V2", runner="V2"))
        about += ", and the V2 runner"
    return Plan(
        name=f"v1-{shape}-{release}{suffix}",
        about=f"{about}, {shape} shape{kernels}",
        arms=tuple(arms),
        loads=find_loads(("decode-1", "decode-8", "decode-32", "decode-128", "mixed")),
        turns=4,
        seconds=2.0,
        reference=Plugin.STOCK.value,
        control=Plugin.NOOP.value,
        keep=beside,
        audited=("decode-1", "decode-32", "mixed"),
    )
