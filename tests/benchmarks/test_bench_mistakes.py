"""A mistake in a command of `python -m benchmarks` is one sentence with the remedy."""

import pytest
from bench_command import bench


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["soak", "no-such"], "there is no soak 'no-such'; there are tiny, "),
        (["soak", "tiny", "--control", "luck"], "--control is 'luck'; it must be one of lengths, fence, short"),
        (["soak", "tiny", "--control", "exact"], "--control is 'exact'; it must be one of lengths, fence, short"),
        (
            ["soak", "0.32.0-V2-FLASHINFER", "--control", "positions"],
            "--control positions breaks the runner of 0.14.0 to 0.18.1 on a GPU, which soak "
            "0.32.0-V2-FLASHINFER does not use; give one of 0.18.1-V1-FLASH_ATTN, 0.18.1-V1-FLASH_ATTN-8b, "
            "0.18.1-V1-FLASH_ATTN-tp2\n",
        ),
        (
            ["soak", "0.18.1-V1-FLASH_ATTN", "--control", "fence"],
            "--control fence breaks the plugin's plans for FlashInfer, which soak 0.18.1-V1-FLASH_ATTN does not use; "
            "give one of 0.26.0-V1-FLASHINFER, ",
        ),
        (
            ["soak", "0.18.1-V1-FLASH_ATTN", "--control", "positions", "--plugin", "stock"],
            "--control positions breaks the plugin, and --plugin is stock; leave out one of the two",
        ),
        (
            ["soak", "tiny", "--control", "short-last-rank"],
            "--control short-last-rank breaks the builders of one of several ranks, which soak tiny does not use; "
            "give one of tiny-tp2",
        ),
        (
            ["soak", "tiny", "--control", "kept"],
            "--control kept breaks kept metadata of linear attention, in the V1 runner, which soak tiny does not use; "
            "give one of tiny-hybrid, 0.26.0-V1-FLASH_ATTN-hybrid",
        ),
        (["soak", "0.26.0-V1-FLASHINFER"], "no environment has vLLM 0.26.0; give --env 0.26.0=FILE"),
        (
            ["soak", "0.32.0-V2-FLASHINFER"],
            "the soak 0.32.0-V2-FLASHINFER needs a GPU, and this machine has none; run it where there is one, or take "
            "tiny\n",
        ),
        (
            ["features", "eagle"],
            "the cases need a GPU, and this machine has none; run them where there is one, or give --cpu\n",
        ),
        (["features", "no-such"], "there is no feature 'no-such'; there are eagle, eagle3, "),
        (["features", "eagle", "--control", "luck"], "--control is 'luck'; it must be one of positions, exact, "),
        (
            ["features", "eagle", "--control", "exact", "--cpu"],
            "--control exact breaks the runner of 0.14.0 to 0.18.1 on a GPU; give --release 0.18.1, and not --cpu\n",
        ),
        (
            ["features", "eagle", "--control", "positions", "--cpu", "--release", "0.18.1"],
            "--control positions breaks the runner of 0.14.0 to 0.18.1 on a GPU; give --release 0.18.1, and not --cpu",
        ),
        (
            ["features", "eagle", "--control", "moved", "--cpu", "--release", "0.18.1"],
            "--control moved breaks rows that the V1 runner of 0.19.0 to 0.29.0 gathers from their old places; give "
            "--release 0.29.0\n",
        ),
        (
            ["features", "eagle", "--control", "exact", "--release", "0.18.1", "--plugin", "stock"],
            "--control exact breaks the plugin, and --plugin is stock; leave out one of the two",
        ),
        (["features", "eagle", "--release", "0.18.1"], "no environment has vLLM 0.18.1; give --env 0.18.1=FILE"),
        (["features", "--audit", "no-such"], "there is no case 'no-such'; there are plain, json-1, "),
        (["features", "--audit", "--only", "0.99"], "--only is '0.99', which is in none of 0.32.0-V2-1b, "),
        (
            ["features", "--audit", "--only", "1b", "--cpu"],
            "--only is '1b', and --cpu has one group; leave out one of the two",
        ),
        (
            ["features", "--audit", "--release", "0.32.0"],
            "--release is not for --audit; leave it out, and choose releases with --only",
        ),
        (["features", "--audit", "--control", "exact"], "--control is not for --audit; leave it out"),
        (
            ["features", "--audit"],
            "the cases need a GPU, and this machine has none; run them where there is one, or give --cpu",
        ),
        (["run", "nothing"], "there is no plan 'nothing'; there are overhead-tiny"),
        (
            ["run", "overhead-tiny", "--turns", "3"],
            "--turns is 3; it must be even, because every other turn runs the arms backwards",
        ),
        (["run", "overhead-tiny", "--env", "0.32.0"], "--env is '0.32.0'; it must be RELEASE=FILE"),
        (["run", "overhead-tiny", "--env", "0.32.0=/nowhere"], "--env 0.32.0 is '/nowhere', which is no file"),
        (["show", "--against", "nobody"], "has no arm 'nobody'; it has"),
        (["plot", "--format", "gif"], "--format is 'gif'; it must be svg or png"),
        (["plot", "/nowhere.json"], "/nowhere.json can't be read"),
        (["batching", "--device", "cpu", "--model", "large"], "the model is 'large'; it must be one of tiny, 1b, 8b"),
        (
            ["batching", "--device", "cpu", "--drafts", "2", "--arms", "synchronous"],
            "the drafts are 2 and the arms synchronous; drafts synchronous",
        ),
        (
            ["batching", "--device", "cpu", "--arms", "drafts asynchronous"],
            "the drafts are 0 and the arms drafts asynchronous; drafts synchronous",
        ),
        (
            ["batching", "--device", "cpu", "--arms", "mine"],
            "there is no arm 'mine'; there are synchronous, synchronous again, asynchronous",
        ),
        (
            ["batching", "--device", "cpu", "--attention", "FAST"],
            "attention is 'FAST'; it must be auto, FLASH_ATTN, FLASHINFER_TRTLLM",
        ),
    ],
)
def test_a_mistake_is_one_sentence(arguments: list[str], sentence: str, monkeypatch: pytest.MonkeyPatch):
    if arguments[0] == "batching":
        pytest.importorskip("transformers")
    monkeypatch.setattr("benchmarks.machine.has_gpu", lambda: False)
    monkeypatch.setattr("benchmarks.cli.common.installed_vllm", lambda: "0.32.0")
    done = bench(*arguments)
    assert done.exit_code == (2 if "no environment" in sentence or "this machine has none" in sentence else 1)
    if arguments[0] in ("soak", "features"):
        assert done.stderr.startswith(f"benchmarks: {sentence}")
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("benchmarks: ")]
    assert sentence.rstrip() in line
    assert not sentence.endswith("\n") or done.output == f"benchmarks: {sentence}"
    assert "Traceback" not in done.output
