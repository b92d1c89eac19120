"""The parent process of the cases of one release, runner and shape.

Engines start in waves, a base engine and some of those compared with it, all at once; then one at a time is timed. In a
wave the other engines come before the base's own cases. Each of these is audited as soon as it was timed, and an audit
may leave a process slower.
"""

import contextlib
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import child
from benchmarks.arms import WORKSPACE_BYTES, Arm, Plugin
from benchmarks.child import ChildError
from benchmarks.machine import gpu_bytes
from benchmarks.plans.engines import ACCEPTANCE, BESIDE_OTHERS, CPU_ENGINE, CPU_ENVIRONMENT, DEFAULT_ENGINE
from benchmarks.shapes import find_shape
from benchmarks.waits.cases import CASES, DRAFT_TOKENS, ENGINES, LOADS, Case, Engine
from benchmarks.waits.result import REASONS, Found, Group, WaitsResult, ratio, step_ms
from vllm_async_spec.json_child import Child

Report = Callable[[str], None]
Turn = list[list[float]]
_Wave = dict[str, Child]
"""The running engines."""

_CACHE_BYTES = {"8b": 3 << 30}
_CACHE_BYTES_ELSE = 2 << 30
"""Keys and values of 32 requests of 384 tokens, and a half more."""
_MOST = 16
_SAID = re.compile(r"failed: (?P<type>\w+): (?P<words>.*?)(?: \(log: .*\))?$", re.S)
_VALIDATION = re.compile(r"Value error, (.*?)(?: \[type=|$)", re.S)
_REFUSING = {"ValueError", "ValidationError", "VLLMValidationError", "NotImplementedError"}
"""Exceptions by which vLLM says that it does not support a configuration."""


class Budget:
    """Seconds for a whole command: a start or a case begins only if one as long as the longest so far still fits."""

    def __init__(self, seconds: float) -> None:
        """Begin to count `seconds`."""
        self._end = time.monotonic() + seconds
        self._longest: dict[str, float] = {}

    def has_room(self, *kinds: str) -> bool:
        """Whether one of each kind fits."""
        return time.monotonic() + sum(self._longest.get(kind, 0.0) for kind in kinds) < self._end

    @contextlib.contextmanager
    def spending(self, kind: str) -> Iterator[None]:
        """Note how long this one takes."""
        begun = time.monotonic()
        try:
            yield
        finally:
            self._longest[kind] = max(self._longest.get(kind, 0.0), time.monotonic() - begun)


@dataclass(frozen=True, slots=True)
class How:
    """How cases are run."""

    plugin: Plugin
    seconds: float
    """Timed seconds of each case; its reference gets as many."""
    steps: int
    """Steps of each audit."""
    together: int
    """Engines that run at once, at most; `fitting` may allow fewer."""
    envs: Mapping[str, Path]
    """By vLLM release, a shell file to source first, or a Python."""
    cache: Path
    """Folder for directories of models and for logs."""
    command: str
    """The command line, kept with the result."""


class WaitsRunner:
    """Runs the cases that the result file of a group lacks."""

    def __init__(self, group: Group, result: WaitsResult, how: How, budget: Budget, report: Report) -> None:
        """Prepare to run cases of `group`; `report` takes a line of progress for each case."""
        self._group, self._result, self._how, self._budget, self._report = group, result, how, budget, report
        self._tried: set[str] = set()

    def missing(self, cases: Sequence[Case], *, retry: bool = False) -> list[Case]:
        """The cases that the result lacks, without those that this shape or a CPU can't have."""
        return [
            case
            for case in cases
            if case.name not in self._tried
            and not self._result.holds(case.name, retry=retry)
            and (engine := ENGINES[case.engine]).shape(self._group.shape)
            and not (self._group.cpu and engine.no_cpu)
        ]

    def run(self, cases: Sequence[Case], *, retry: bool = False) -> bool:
        """Run the missing cases, and write the file after each.

        Returns:
            Whether none is left.

        Raises:
            PlanError: the file can't be written.
            WaitsError: the file holds cases of another device.
        """
        while missing := self.missing(cases, retry=retry):
            base = ENGINES[missing[0].engine].base
            if not self._budget.has_room("start", "case", "audit"):
                self._say_left(missing)
                return False
            before = len(self._tried)
            if not self._run_wave(base, [case for case in missing if ENGINES[case.engine].base == base]):
                self._say_left(self.missing(cases, retry=retry))
                return False
            if len(self._tried) == before:
                self._report(f"{self._group.name}: no case of this wave could run")
                return False
        return True

    def _say_left(self, missing: Sequence[Case]) -> None:
        names = ", ".join(case.name for case in missing)
        self._report(f"{self._group.name}: cases left: {names}; run the same command again for them")

    def _run_wave(self, base: str, missing: Sequence[Case]) -> bool:
        """Start a base engine and some of the others, and run their cases; whether there was time for all of them."""
        others = list(dict.fromkeys(case.engine for case in missing if case.engine != base))
        others = others[: min(self._how.together, fitting(self._group)) - 1]
        with contextlib.ExitStack() as stack:
            with self._budget.spending("start"):
                wave = self._started([base, *others], missing, stack)
            stack.callback(_hang_up, wave)
            if base not in wave:
                return True
            for name in others:
                own = [case for case in missing if case.engine == name and name in wave]
                if not self._run_cases(own, wave):
                    return False
            return all(self._run_cases([case], wave) for case in missing if case.engine == base)

    def _started(self, names: Sequence[str], missing: Sequence[Case], stack: contextlib.ExitStack) -> _Wave:
        """Start engines at once, `names[0]` being the base; the cases of one that does not start get the reason."""
        wave: _Wave = {}
        starting = {}
        for name in names:
            log = self._how.cache / "logs" / f"waits-{self._group.name}-{name}.log"
            starting[name] = stack.enter_context(
                child.start(
                    arm_of(ENGINES[name], self._group, self._how.plugin),
                    LOADS,
                    audit=self._how.plugin is not Plugin.STOCK,
                    env=self._how.envs.get(self._group.release),
                    # Not shared: an engine could read a file that another is writing.
                    models=self._how.cache / "models" / f"waits-{name}",
                    log=log,
                    module="benchmarks.waits.engine",
                    more={"kind": name},
                )
            )
        for name in names[::-1]:
            own = [case for case in missing if case.engine == name]
            if not own and not wave:  # the base, with nothing left to compare
                starting[name].process.kill()
                break
            try:
                starting[name].wait_until_ready()
                self._result.describe(name, starting[name].ask("describe"))
                wave[name] = starting[name]
            except ChildError as error:
                for case in own:
                    self._keep(case, why(error))
                if not own:
                    self._report(f"{self._group.name} {name}: {error}")
        return wave

    def _run_cases(self, cases: Sequence[Case], wave: _Wave) -> bool:
        """Time cases of one engine and then audit them; whether there was time for all of them."""
        timed = {}
        for case in cases:
            if not self._budget.has_room("case", "audit"):
                return False
            if not {case.engine, ENGINES[case.engine].base} <= wave.keys():
                return True  # an engine died; what is left gets another wave
            with self._budget.spending("case"):
                found = self._guarded(case, wave, self._time)
            self._keep(case, found)
            if "turns" in found:
                timed[case.name] = found
        for name, found in timed.items():
            case = CASES[name]
            if case.engine not in wave:
                return True
            if self._how.plugin is Plugin.STOCK:
                audit: Found = {"audit": None}
            else:
                with self._budget.spending("audit"):
                    audit = self._guarded(case, wave, self._audit)
            self._keep(case, found | audit)
        return True

    def _guarded(self, case: Case, wave: _Wave, work: Callable[[Case, _Wave], Found]) -> Found:
        """What `work` finds, or why an engine died."""
        try:
            return work(case, wave)
        except ChildError as error:
            return {"failed": str(error)}

    def _time(self, case: Case, wave: _Wave) -> Found:
        """Turns of the case between turns of its reference: plain, case, case, plain."""
        if case.reference is None:
            turn = self._turn(case.name, wave, self._how.seconds)
            return turn if isinstance(turn, dict) else {"turns": [turn]}
        turns = []
        for name in (case.reference, case.name, case.name, case.reference):
            turn = self._turn(name, wave, self._how.seconds / 2)
            if isinstance(turn, dict):
                return turn
            turns.append(turn)
        return {"turns": turns[1:3], "reference": [turns[0], turns[3]]}

    def _turn(self, case: str, wave: _Wave, seconds: float) -> Turn | Found:
        """The runs of one turn, or the reason for which there is none."""
        answer = self._ask(wave, "time_case", case, seconds=seconds)
        turn: Turn | Found = answer.get("runs", answer)
        return turn

    def _audit(self, case: Case, wave: _Wave) -> Found:
        return {"audit": self._ask(wave, "audit_case", case.name, steps=self._how.steps)}

    def _ask(self, wave: _Wave, command: str, case: str, **arguments: float) -> Found:
        """Ask the engine of a case; an engine that fails ends, and is out of the wave."""
        try:
            return wave[CASES[case].engine].ask(command, case=case, **arguments)
        except ChildError:
            del wave[CASES[case].engine]
            raise

    def _keep(self, case: Case, found: Found) -> None:
        """Write what was found so far, and say it once it is complete."""
        self._result.add(case.name, found, self._how.command)
        if "audit" in found or any(reason in found for reason in REASONS):
            self._tried.add(case.name)
            self._report(f"{self._group.name} {case.name}: {in_short(found)}")


def _hang_up(wave: _Wave) -> None:
    """Let all engines end at the same time; each is then waited for."""
    for engine in wave.values():
        if engine.process.stdin is not None:
            engine.process.stdin.close()


def fitting(group: Group) -> int:
    """Engines that this machine's GPU can hold at once, but at least a base and one other."""
    room = gpu_bytes()
    if room is None or group.cpu:
        return _MOST
    cache = _CACHE_BYTES.get(group.shape, _CACHE_BYTES_ELSE)
    each = 1.15 * 2 * find_shape(group.shape).parameters + cache + WORKSPACE_BYTES
    return max(int(0.95 * room / each), 2)


def arm_of(engine: Engine, group: Group, plugin: Plugin) -> Arm:
    """The arm of an engine: vLLM's defaults, apart from the size of its cache.

    On a CPU vLLM runs eagerly, and synchronously.
    """
    shape = engine.shape(group.shape)
    assert shape is not None
    cache = {"kv_cache_memory_bytes": _CACHE_BYTES.get(group.shape, _CACHE_BYTES_ELSE)}
    options = CPU_ENGINE if group.cpu else DEFAULT_ENGINE | BESIDE_OTHERS | cache
    return Arm(
        engine.name,
        shape,
        plugin=plugin,
        release=group.release,
        runner=group.runner,
        method=engine.method,
        draft_tokens=DRAFT_TOKENS,
        acceptance=ACCEPTANCE,
        engine=dict(options) | {"enable_prefix_caching": True} | dict(engine.options),
        environment=CPU_ENVIRONMENT if group.cpu else {},
    )


def why(error: ChildError) -> Found:
    """What the end of an engine means for its cases: `lacks`, `refused` with vLLM's words, or `failed`."""
    said = _SAID.search(str(error))
    if said is None:
        return {"failed": str(error)}
    if said["type"] == "LacksError":
        return {"lacks": said["words"]}
    if said["type"] in _REFUSING:
        inner = _VALIDATION.search(said["words"])
        return {"refused": inner[1].strip() if inner else said["words"]}
    return {"failed": str(error)}


def in_short(found: Found) -> str:
    """A result in one line."""
    for reason in REASONS:
        if reason in found:
            return f"{'vLLM refuses it: ' if reason == 'refused' else ''}{found[reason]}"
    compared, audit = ratio(found), found["audit"]
    parts = [f"{step_ms(found['turns']):.2f} ms a step"]
    if compared is not None:
        parts.append("{:.3f} times its reference ({:.3f}-{:.3f})".format(*compared))
    parts.append("not audited" if audit is None else f"{audit['critical'][0]:.2f} critical waits a step")
    return ", ".join(parts)
