"""What `status` says about the scheduling of an engine on vLLM's CPU platform."""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")

ASK = """
import json, os, sys
os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
from vllm_async_spec.vllm_plugin import status
from vllm_async_spec.vllm_plugin.serve_arguments import ArgumentsError

# What is tested is the engine's part; the patches' modules take seconds to import.
status._import_targets = lambda ledger: None
answers = {}
for name, (arguments, plugins) in json.load(sys.stdin).items():
    os.environ.pop("VLLM_PLUGINS", None)
    if plugins is not None:
        os.environ["VLLM_PLUGINS"] = plugins
    try:
        found = status.read_status(arguments)
        answers[name] = [found.async_scheduling, found.decided_by, found.reason, found.remedy]
    except ArgumentsError as error:
        answers[name] = [None, None, str(error), None]
print(json.dumps(answers))
"""
NGRAM = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}'
PADDED = (
    '{"method": "draft_model", "model": "LLAMA", "num_speculative_tokens": 3, "disable_padded_drafter_batch": true}'
)
DRAFTS = '{"method": "draft_model", "model": "LLAMA", "num_speculative_tokens": 3}'
REFUSES = "vLLM refuses asynchronous scheduling with"
PLATFORM = "vLLM's CPU platform turns asynchronous scheduling off"
OFF = "VLLM_ASYNC_SPEC is off, so vLLM runs as stock"
OUT = "VLLM_PLUGINS leaves the plugin out, so vLLM runs as stock"
LIKE_EAGLE = "choose a speculative method that vLLM schedules asynchronously, such as eagle"
ACCEPTS = "vLLM accepts asynchronous scheduling with the method draft_model"

Case = tuple[tuple[str, ...], tuple[bool | None, str | None, str, str | None]]
DRAFTING = ("LLAMA", "--speculative-config", DRAFTS)
LEFT_OUT = "left out"
"""The case that has another plugin in `VLLM_PLUGINS`."""
CASES: dict[str, dict[str, Case]] = {
    "auto": {
        # The plugin is loaded by the next case, so this one comes first.
        LEFT_OUT: (DRAFTING, (False, "vLLM", f"{OUT}: {PLATFORM}", "add async_spec to VLLM_PLUGINS")),
        "draft model": (
            DRAFTING,
            (True, "vllm-async-spec", f"{ACCEPTS}, and the plugin keeps vLLM's CPU platform from turning it off", None),
        ),
        "no speculation": (
            ("--max-model-len", "64", "LLAMA", "--port", "18000"),
            (
                False,
                "vLLM",
                f"{PLATFORM}, and the plugin keeps it on there only with speculative decoding",
                "add --speculative-config",
            ),
        ),
        "ngram": (
            ("LLAMA", "--speculative-config", NGRAM),
            (False, "vLLM", f"{REFUSES} the method ngram: ", LIKE_EAGLE),
        ),
        "padded": (
            ("--model", "LLAMA", "--speculative-config", PADDED),
            (False, "vLLM", f"{REFUSES} disable_padded_drafter_batch: ", "leave out disable_padded_drafter_batch"),
        ),
        # Without drafts the platform turns asynchronous scheduling off before vLLM could refuse; so drafts look guilty.
        "pipeline": (
            (*DRAFTING, "--pipeline-parallel-size", "2"),
            (
                False,
                "vLLM",
                f"{REFUSES} pipeline parallelism: Model Runner V1 does not support",
                "leave out --pipeline-parallel-size",
            ),
        ),
        "yes": ((*DRAFTING, "--async-scheduling"), (True, "user", "--async-scheduling was given", None)),
        "no": (
            (*DRAFTING, "--no-async-scheduling"),
            (False, "user", "--no-async-scheduling was given", "leave out --no-async-scheduling"),
        ),
        "no, and nothing to win": (
            ("LLAMA", "--no-async-scheduling"),
            (False, "user", "--no-async-scheduling was given", None),
        ),
        "yes, and the platform overrules it": (
            ("LLAMA", "--async-scheduling"),
            (False, "vLLM", f"{PLATFORM}, although --async-scheduling was given, and the plugin", "add --spec"),
        ),
        "yes, and vLLM refuses": (
            ("LLAMA", "--speculative-config", NGRAM, "--async-scheduling"),
            (None, None, "Currently, async scheduling is only supported with", None),
        ),
        "unknown": (("LLAMA", "--frobnicate", "3"), (None, None, "unrecognized arguments: --frobnicate 3", None)),
        "wrong value": (("LLAMA", "--max-model-len", "many"), (None, None, "argument --max-model-len: ", None)),
        "no model": (("--max-model-len", "64"), (None, None, "they name no model; give the model first", None)),
    },
    "off": {
        "draft model": (DRAFTING, (False, "vLLM", f"{OFF}: {PLATFORM}", "unset VLLM_ASYNC_SPEC")),
        "ngram": (
            ("LLAMA", "--speculative-config", NGRAM),
            (False, "vLLM", f"{OFF}: {PLATFORM}", f"unset VLLM_ASYNC_SPEC and {LIKE_EAGLE}"),
        ),
        "no speculation": (
            ("LLAMA",),
            (False, "vLLM", f"{OFF}: {PLATFORM}", "unset VLLM_ASYNC_SPEC and add --speculative-config"),
        ),
        "no": (("LLAMA", "--no-async-scheduling"), (False, "user", "--no-async-scheduling was given", None)),
    },
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Mapping[tuple[str, str], list[Any]]:
    """The answers to all cases, from one process for each mode, since most of its time is vLLM's imports."""
    from vllm_async_spec.compat.builders import write_llama

    llama = str(write_llama(tmp_path_factory.mktemp("models") / "llama"))
    processes = {}
    for mode, cases in CASES.items():
        environment = os.environ | {"VLLM_ASYNC_SPEC": mode, "HF_HUB_OFFLINE": "1"}
        asked = {
            name: ([each.replace("LLAMA", llama) for each in arguments], "another" if name == LEFT_OUT else None)
            for name, (arguments, _) in cases.items()
        }
        process = subprocess.Popen(
            [sys.executable, "-c", ASK],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        processes[mode] = process, json.dumps(asked)
    found = {}
    for mode, (process, asked) in processes.items():
        out, err = process.communicate(asked)
        assert process.returncode == 0, err
        found |= {(mode, name): answer for name, answer in json.loads(out.splitlines()[-1]).items()}
    return found


@pytest.mark.parametrize(("mode", "name"), [(mode, name) for mode, cases in CASES.items() for name in cases])
def test_each_case_has_its_own_true_reason_and_remedy(answers: Mapping[tuple[str, str], list[Any]], mode, name):
    on, by, reason, remedy = CASES[mode][name][1]
    found = answers[mode, name]
    assert found[:2] == [on, by], found
    assert found[2].startswith(reason), found
    assert found[3] is None if remedy is None else found[3].startswith(remedy), found
    assert "\n" not in found[2]
