"""Runs a plan: each turn starts an engine, runs the loads, stops the engine, and is written at once."""

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import caches, child
from benchmarks.arms import Arm, Plan
from benchmarks.audited import AUDIT_STEPS, of_rank
from benchmarks.child import ChildError
from benchmarks.machine import gpu_bytes, gpus, has_gpu, installed_vllm, too_few_gpus
from benchmarks.results import ResultFile, Turn
from vllm_async_spec.json_child import Child

Report = Callable[[str], None]
Engines = Callable[[Arm], contextlib.AbstractContextManager[Child]]
"""Gives an arm its engine for the length of a turn."""


class Runner:
    """Runs the turns of a plan that its result file does not hold yet."""

    def __init__(
        self,
        plan: Plan,
        result: ResultFile,
        *,
        command: str,
        envs: Mapping[str, Path],
        cache: Path,
        report: Report = lambda line: None,
    ) -> None:
        """Prepare to run `plan`.

        Args:
            command: the command line, kept with the result.
            envs: by vLLM release, a shell file to source first, or a Python.
            cache: folder for directories of models and for logs.
            report: takes a line of progress for each turn.
        """
        self._plan, self._result, self._command, self._report = plan, result, command, report
        self._envs, self._cache = envs, cache
        self._until = float("inf")
        self._beside: dict[str, int] = {}

    def run(self, *, only: str = "", budget: float = float("inf"), retry: bool = False) -> bool:
        """Run the missing turns.

        Args:
            only: run only arms whose name contains this, or one of several with commas between.
            budget: seconds. No turn starts if one as long as the longest so far would end later.
            retry: whether failed turns run again.

        Returns:
            Whether no requested turn is missing.
        """
        begun, longest = time.monotonic(), 0.0
        self._until = begun + budget
        self._result.begin()
        missing = self.missing(only=only, retry=retry)
        without = sorted({arm.release for _, arm in missing if arm.release and not self._has(arm.release)})
        if without:
            self._report(f"no environment has vLLM {', '.join(without)}; give --env RELEASE=FILE to run its arms")
            missing = [(number, arm) for number, arm in missing if arm.release not in without]
        arms = {arm.name: arm for _, arm in missing}
        with self._children([*arms.values()]) as engine:
            for done, (number, arm) in enumerate(missing):
                start = time.monotonic()
                if start - begun + longest > budget:
                    self._report(f"turns left: {len(missing) - done}; run the same command again for them")
                    return False
                turn = self._turn(number, arm, engine)
                if "error" in turn and time.monotonic() >= self._until:  # it would not have failed with more time
                    self._report(f"turns left: {len(missing) - done}; run the same command again for them")
                    return False
                took = time.monotonic() - start
                longest = max(longest, took)
                self._result.add(turn, self._command)
                self._report(f"{done + 1}/{len(missing)} {arm.name}: {_in_short(turn, took)}")
        return not without

    def missing(self, *, only: str = "", retry: bool = False) -> list[tuple[int, Arm]]:
        """The turns that `run` would run, as (pass, arm)."""
        chosen = self._plan.named(only)
        asked = [(number, arm) for number, arm in self._plan.order() if arm in chosen]
        beside = {arm.name for arm in chosen} & {self._plan.reference, self._plan.control}
        lacking = [turn for turn in asked if not self._result.holds(*turn, beside, failed=not retry)]
        again = {number for number, _ in lacking}
        return [turn for turn in asked if turn in lacking or (turn[1].name in beside and turn[0] in again)]

    def lacks(self, arms: Iterable[Arm]) -> str | None:
        """Why this machine can run none of these arms, with the remedy; None if it can run one."""
        arms = list(arms)
        if all(arm.needs_gpu for arm in arms) and not has_gpu():
            return "its engines need a GPU, and this machine has none; run it where there is one, or take overhead-tiny"
        releases = sorted({arm.release for arm in arms if arm.release})
        if all(arm.release and not self._has(arm.release) for arm in arms):
            return f"no environment has vLLM {', '.join(releases)}; give --env RELEASE=FILE"
        if not self._envs and installed_vllm() is None:
            return "vLLM is not installed in this environment; install it, or give --env RELEASE=FILE"
        few = too_few_gpus(gpus(), min((arm.gpus for arm in arms), default=1))
        return f"each of its engines {few}" if few else self._lacks_memory(arms)

    def _lacks_memory(self, arms: Sequence[Arm]) -> str | None:
        room = gpu_bytes()
        if room is None or not arms:
            return None
        if not self._plan.keep:
            needed = min(arm.gpu_weight_bytes for arm in arms)
            each = f"its engine has {needed / 1e9:.1f} GB of weights"
        else:
            needed = sum(arm.gpu_bytes for arm in arms)
            each = f"{len(arms)} engines side by side need about {needed / 1e9:.0f} GB"
        if needed <= room:
            return None
        fewer = "give --one-by-one, or --only with fewer arms, or " if self._plan.keep else ""
        return f"{each}, and the GPU has {room / 1e9:.1f} GB; {fewer}run it on a larger GPU"

    def _has(self, release: str) -> bool:
        return release in self._envs or release == installed_vllm()

    def _turn(self, number: int, arm: Arm, engine: Engines) -> Turn:
        turn: Turn = {"pass": number, "arm": arm.name}
        try:
            with engine(arm) as process:
                turn["facts"] = process.ask("describe") | {"beside": self._beside.get(arm.name, 1)}
                loads = turn["loads"] = {}  # measured loads stay, even if a later one fails
                for load in self._plan.loads:
                    loads[load.name] = process.ask(
                        "measure", load=load.name, seconds=self._plan.seconds, repetitions=self._plan.repetitions
                    )
                if audited := self._plan.audits(number, arm):
                    turn["audits"] = {
                        of_rank(load, rank): process.ask("audit", load=load, steps=AUDIT_STEPS, rank=rank)
                        for load in audited
                        for rank in range(arm.gpus)
                    }
        except ChildError as error:
            turn["error"] = str(error)
        return turn

    @contextlib.contextmanager
    def _children(self, arms: Sequence[Arm]) -> Iterator[Engines]:
        """Gives engines to arms: a new engine for each turn, or one engine for each arm until the end.

        Engines that stay start at once, and all are ready before the first is timed.
        """
        with contextlib.ExitStack() as stack:
            kept: dict[str, Child] = {}
            failed: dict[str, ChildError] = {}
            longest = max(load.longest for load in self._plan.loads)
            for together in caches.waves(arms, longest=longest) if self._plan.keep else []:
                begun = [(arm.name, stack.enter_context(self._begun(arm))) for arm in together]
                for name, process in begun:
                    self._beside[name] = len(together)
                    try:
                        process.wait_until_ready()
                        kept[name] = process
                    except ChildError as error:
                        failed[name] = error

            @contextlib.contextmanager
            def shared(arm: Arm) -> Iterator[Child]:
                if arm.name in failed:
                    raise failed[arm.name]
                yield kept[arm.name]

            yield shared if self._plan.keep else self._started

    @contextlib.contextmanager
    def _started(self, arm: Arm) -> Iterator[Child]:
        with self._begun(arm) as process:
            process.wait_until_ready()
            yield process

    def _begun(self, arm: Arm) -> contextlib.AbstractContextManager[Child]:
        return child.start(
            arm,
            self._plan.loads,
            audit=bool(self._plan.audited) and arm.has_agent,
            env=self._envs.get(arm.release) if arm.release else None,
            models=self._cache / "models",
            log=self._cache / "logs" / f"{self._plan.name}-{arm.name}.log",
            limit_s=max(self._until - time.monotonic(), 1.0),
        )


def _in_short(turn: dict[str, Any], seconds: float) -> str:
    if "error" in turn:
        return str(turn["error"])
    speeds = (
        f"{name} {load['step_ms']:.2f} ms, {load['tokens_per_second']:.0f} tokens/s"
        for name, load in turn["loads"].items()
    )
    return "; ".join(speeds) + f" ({seconds:.0f} s)"
