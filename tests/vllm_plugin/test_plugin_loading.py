"""The plugin as a process loads it."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from vllm_async_spec.vllm_plugin.plugin import _is_vllms_command_line
from vllm_async_spec.vllm_plugin.settings import Mode, SettingError, Settings


def test_settings_name_bad_values():
    assert Settings.read({}).mode is Mode.AUTO
    strict = Settings.read({"VLLM_ASYNC_SPEC": "strict", "VLLM_ASYNC_SPEC_SYNC": "warn"})
    assert (strict.mode, strict.mode_from, strict.sync.value) == (Mode.STRICT, "environment", "warn")
    with pytest.raises(SettingError, match="VLLM_ASYNC_SPEC is 'on'; it must be one of auto, strict, off"):
        Settings.read({"VLLM_ASYNC_SPEC": "on"})
    with pytest.raises(SettingError, match="VLLM_ASYNC_SPEC_SYNC is ''; it must be one of allow, warn, error"):
        Settings.read({"VLLM_ASYNC_SPEC_SYNC": ""})


def in_a_process(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, env=os.environ | environment
    )


def printed(code: str, **environment: str) -> str:
    done = in_a_process(code, **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_off_touches_nothing():
    code = """
        import os, sys, vllm_async_spec
        bare = list(sys.meta_path), dict(os.environ)
        from vllm_async_spec.vllm_plugin.plugin import load
        assert load().ledger is None
        assert (sys.meta_path, os.environ) == bare
    """
    assert printed(code, VLLM_ASYNC_SPEC="off") == ""


def test_the_release_decides_also_where_vllm_is_imported_later():
    code = """
        import sys
        from vllm_async_spec.vllm_plugin.plugin import load
        ledger = load().ledger
        assert "vllm" not in sys.modules
        before = {name for name, outcome in ledger.outcomes.items() if outcome.state.value == "not needed"}
        import vllm
        from vllm_async_spec.vllm_plugin.plugin import _release
        assert vllm.__version__.startswith(_release())
        print(*sorted(before))
    """
    pytest.importorskip("vllm", reason="its version is read")
    assert "metadata-optional-host-lengths" in printed(code).split()  # which 0.12 alone needs


AUDIT = ["audit-engine-core", "audit-route", "audit-worker"]


@pytest.mark.parametrize("mode", ["auto", "off"])
def test_without_an_audit_nothing_of_it_is_there_and_with_one_off_patches_nothing_else(mode):
    code = """
        import json, sys, torch
        from vllm_async_spec.vllm_plugin.plugin import load
        ledger = load().ledger
        ours = ("vllm_async_spec.audit", "vllm_async_spec.vllm_plugin.audit")
        modules = [name for name in sys.modules if name.startswith(ours)]
        print(json.dumps([modules, list(ledger.outcomes) if ledger else [], torch.Event.__module__]))
    """
    modules, patches, event = json.loads(printed(code, VLLM_ASYNC_SPEC=mode))
    assert (modules, set(patches).intersection(AUDIT), event) == ([], set(), "torch")
    modules, with_audit, event = json.loads(printed(code, VLLM_ASYNC_SPEC=mode, VLLM_ASYNC_SPEC_AUDIT="1"))
    assert "vllm_async_spec.vllm_plugin.audit_agent.agent" in modules
    assert with_audit == sorted([*patches, *AUDIT])
    assert (patches == []) == (mode == "off")
    assert event == "vllm_async_spec.audit." + ("cpu_waits" if torch.version.cuda is None else "cuda_waits")


def test_loading_twice_is_the_same_as_once_and_a_forked_child_is_loaded():
    code = """
        import os
        from vllm_async_spec.vllm_plugin import register
        from vllm_async_spec.vllm_plugin.plugin import active_plugin
        register(); first = active_plugin(); register()
        assert active_plugin() is first is not None
        if os.fork() == 0:
            register()
            os._exit(0 if active_plugin() is first else 1)
        assert os.wait()[1] == 0
    """
    printed(code)


def test_a_bad_setting_stops_vllms_command_line_with_one_sentence():
    code = """
        import sys
        sys.argv = ['/usr/bin/vllm', 'serve']
        from vllm_async_spec.vllm_plugin import register
        register()
    """
    done = in_a_process(code, VLLM_ASYNC_SPEC="maybe")
    assert done.returncode == 1
    assert done.stderr == "vllm-async-spec: VLLM_ASYNC_SPEC is 'maybe'; it must be one of auto, strict, off\n"


@pytest.mark.parametrize(
    ("program", "ends"),
    [
        ("/usr/bin/vllm", True),
        ("/x/site-packages/vllm/entrypoints/openai/api_server.py", True),
        ("/x/site-packages/vllm/entrypoints/launchers/api_server/entry.py", True),
        ("/x/site-packages/vllm/entrypoints/cli/main.py", True),
        ("/home/vllm/serve.py", False),
    ],
)
def test_only_vllms_own_command_lines_end_without_a_traceback(program, ends):
    assert _is_vllms_command_line(Path(program)) is ends
