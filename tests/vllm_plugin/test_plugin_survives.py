"""What is broken costs one line in the mode `auto`, and one sentence and the start in `strict`; never a traceback."""

import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
REGISTER = "from vllm_async_spec.vllm_plugin import register; register(); print('served')"


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    keep = shutil.ignore_patterns("__pycache__", "*.txt", "compat", "demo", "generation")
    shutil.copytree(ROOT / "vllm_async_spec", tmp_path / "vllm_async_spec", ignore=keep)
    shutil.copytree(ROOT / "patches", tmp_path / "patches")
    return tmp_path


def run(code: str, path: Path, mode: str = "auto") -> subprocess.CompletedProcess[str]:
    variables = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        cwd=path,
        env=variables | {"PYTHONPATH": str(path), "VLLM_ASYNC_SPEC": mode},
    )


ENTRY = Path("patches/min-tokens.toml")
NO_ENTRY = "min-tokens.toml is not a ledger entry"
PROSE = 'summary = "s"\nwhy = "w"\nupstream = "u"\nremove_when = "r"\n'
BROKEN: dict[str, tuple[Path, str | bytes | Callable[[Path], object], str]] = {
    "not UTF-8": (ENTRY, b'summary = "\xff"', f"{NO_ENTRY}: 'utf-8' codec can't decode byte 0xff"),
    "not TOML": (ENTRY, "summary =", f"{NO_ENTRY}: Invalid"),
    "incomplete": (ENTRY, PROSE, f"{NO_ENTRY}: releases is missing"),
    "no targets": (ENTRY, f'{PROSE}releases=[">=0.12"]\ntargets=[]\n', f"{NO_ENTRY}: it has no targets"),
    "a directory": (ENTRY, lambda path: (path.unlink(), path.mkdir()), f"{NO_ENTRY}: [Errno 21] Is a directory"),
    "no range": (
        ENTRY,
        lambda path: path.write_text(path.read_text().replace(">=", "from ")),
        f"{NO_ENTRY}: Invalid specifier: 'from 0.19'",
    ),
    "no lock": (
        Path("patches/fingerprints.lock"),
        "{",
        "fingerprints.lock is not a lock file of fingerprints: Expecting property name",
    ),
    "gone": (ENTRY, Path.unlink, "min-tokens: it has no entry in the ledger"),
    "no ledger": (Path("patches"), shutil.rmtree, "PatchError: there is no patch ledger in"),
    "a patch that can't be imported": (
        Path("vllm_async_spec/vllm_plugin/patches/min_tokens.py"),
        "raise ImportError('no such')",
        "vllm-async-spec can't be imported: ImportError: no such",
    ),
    "a core that can't be imported": (
        Path("vllm_async_spec/sync_policy.py"),
        "import no_such_module",
        "can't be imported: ModuleNotFoundError: No module named 'no_such_module'",
    ),
}


def spoil(installed: Path, broken: str) -> str:
    """Replace or change the file of this case; the message that is expected then."""
    path, how, message = BROKEN[broken]
    if callable(how):
        how(installed / path)
    else:
        (installed / path).write_bytes(how if isinstance(how, bytes) else how.encode())
    return message


@pytest.mark.parametrize("broken", BROKEN)
def test_what_is_broken_costs_one_line_and_stops_nobody(broken: str, installed: Path):
    message = spoil(installed, broken)
    done = run(REGISTER, installed)
    assert done.stdout == "served\n", done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert sum(message.split(":")[0] in line for line in done.stderr.splitlines()) == 1, done.stderr


@pytest.mark.parametrize("broken", BROKEN)
def test_in_strict_it_is_one_sentence_and_no_start(broken: str, installed: Path):
    message = spoil(installed, broken)
    done = run(REGISTER, installed, "strict")
    assert (done.returncode, done.stdout) == (1, "")
    assert message.removeprefix("min-tokens: ") in done.stderr
    assert "Traceback" not in done.stderr


def test_the_copy_itself_is_right(installed: Path):
    done = run(REGISTER, installed, "strict")
    assert (done.returncode, done.stdout) == (0, "served\n"), done.stderr


UPSTREAM = """
    from vllm_async_spec.vllm_plugin import plugin
    from vllm_async_spec.vllm_plugin.ledger import Implementation, PatchSpec, Target

    def never(transaction, module):
        raise AssertionError("a changed target was patched")

    plugin.IMPLEMENTATIONS.clear()
    plugin.IMPLEMENTATIONS["p"] = Implementation(never)
    target = Target("upstream.first", "f", {"1.0": "0"})
    plugin.read_ledger = lambda: ((PatchSpec("p", "s", "w", "u", "r", (target,)),), {})
    plugin.load()
"""


@pytest.fixture
def upstream(tmp_path: Path) -> Path:
    package = tmp_path / "upstream"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "first.py").write_text("def f():\n    return 1\n")
    for name in ("vllm_async_spec", "patches"):
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


SWALLOW = "try:\n    import upstream.first\nexcept BaseException:\n    pass\n"
SWALLOWED = {
    "except Exception": SWALLOW.replace("BaseException", "Exception"),
    "except BaseException": f"{SWALLOW}import upstream.first\n",
    "until there is an engine": f"{SWALLOW}import vllm.v1.engine.core\nvllm.v1.engine.core.EngineCore()\n",
    "until the plugin is loaded again": f"{SWALLOW}plugin.entry_point()\n",
}


@pytest.mark.parametrize("swallowed", SWALLOWED)
def test_in_strict_a_refusal_that_is_swallowed_stops_the_start_later(swallowed: str, upstream: Path):
    engine = upstream / "vllm" / "v1" / "engine"
    engine.mkdir(parents=True)
    for folder in (engine, engine.parent, engine.parent.parent):
        (folder / "__init__.py").write_text("")
    (engine / "core.py").write_text("class EngineCore:\n    def __init__(self):\n        print('started')\n")
    code = textwrap.dedent(UPSTREAM) + SWALLOWED[swallowed] + "print('served')\n"
    done = run(code, upstream, "strict")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.count("vllm-async-spec: p was refused: upstream.first:f matches no release") == 1
    assert "Traceback" not in done.stderr
    done = run(code, upstream, "auto")
    assert done.stdout.endswith("served\n"), done.stderr
    assert done.stderr.count("running stock vLLM for p: upstream.first:f matches no release") == 1


COPIES = """
    import functools, importlib
    from pathlib import Path

    def double(transaction, module):
        original = module.f
        transaction.set_function(module, "f", functools.wraps(original)(lambda: 2 * original()))

    def load(package):
        plugin = importlib.import_module(f"{package}.vllm_plugin.plugin")
        ledger = importlib.import_module(f"{package}.vllm_plugin.ledger")
        prints = importlib.import_module(f"{package}.vllm_plugin.ledger.fingerprint")
        found = prints.fingerprints(Path("upstream/first.py").read_text(), ["f"])["f"]
        target = ledger.Target("upstream.first", "f", {"1.0": found})
        plugin.IMPLEMENTATIONS.clear()
        plugin.IMPLEMENTATIONS["p"] = ledger.Implementation(double)
        plugin._release = lambda: "1.0"
        plugin.read_ledger = lambda: ((ledger.PatchSpec("p", "s", "w", "u", "r", (target,)),), {})
        plugin.load()

    load("vllm_async_spec")
    load("fork_of_it")
    import upstream.first
    print(upstream.first.f(), type(upstream.first.__loader__).__name__)
"""


def test_of_two_copies_under_different_names_one_stands_back(upstream: Path):
    """Each finds modules by the finders after it: neither asks the other for ever."""
    shutil.copytree(ROOT / "vllm_async_spec", upstream / "fork_of_it", ignore=shutil.ignore_patterns("__pycache__"))
    for path in (upstream / "fork_of_it").rglob("*.py"):
        path.write_text(path.read_text().replace("vllm_async_spec", "fork_of_it"))
    done = run(COPIES, upstream)
    assert done.stdout == "2 SourceFileLoader\n", done.stderr
    assert done.stderr.count("running stock vLLM for p: upstream.first:f has been replaced by another plugin") == 1
