"""The entries beside the ledger."""

import pytest

from vllm_async_spec.vllm_plugin.audit_agent import agent as audit_agent
from vllm_async_spec.vllm_plugin.ledger import (
    PatchError,
    PatchSpec,
    Target,
    ledger_directory,
    load_ledger,
    release_runs,
)
from vllm_async_spec.vllm_plugin.ledger.entries import lock_text, missing
from vllm_async_spec.vllm_plugin.ledger.readme import readme
from vllm_async_spec.vllm_plugin.patches.implementations import PATCHES
from vllm_async_spec.vllm_plugin.plugin import IMPLEMENTATIONS


def test_the_ledger_and_the_code_name_the_same_patches():
    assert {spec.name for spec in load_ledger()} == set(IMPLEMENTATIONS) | set(audit_agent.IMPLEMENTATIONS)


def test_a_broken_ledger_entry_is_named(tmp_path):
    (tmp_path / "odd.toml").write_text("summary = 1\n")
    with pytest.raises(PatchError, match=r"fingerprints.lock is not a lock file of fingerprints: \[Errno 2\]"):
        load_ledger(tmp_path)
    (tmp_path / "fingerprints.lock").write_text(lock_text({}))
    with pytest.raises(PatchError, match=r"odd.toml is not a ledger entry: summary is 1; it must be a string"):
        load_ledger(tmp_path)
    with pytest.raises(PatchError, match="there is no patch ledger in"):
        load_ledger(tmp_path / "nowhere")


def test_the_readme_beside_the_entries_is_theirs():
    assert (ledger_directory() / "README.md").read_text() == readme(load_ledger()), (
        "run `vllm-async-spec patches verify --update` with any release of the ledger"
    )


@pytest.mark.parametrize("spec", load_ledger(), ids=lambda spec: spec.name)
def test_an_entry_is_short_names_its_module_and_knows_a_release_of_each_range(spec):
    assert len((ledger_directory() / f"{spec.name}.toml").read_text().splitlines()) <= 30
    for each in spec.ranges:
        assert any(release in each for release in spec.releases), f"no fingerprint is known for {each}"
    code = PATCHES | {"audit": audit_agent}
    stem = max((stem for stem in code if spec.name.replace("-", "_").startswith(stem)), key=len)
    assert spec.name in code[stem].IMPLEMENTATIONS


def test_releases_are_shown_as_runs_without_gaps():
    def entry(*releases: str) -> PatchSpec:
        return PatchSpec("p", "", "", "", "", (Target("m", "q", dict.fromkeys(releases, "0")),))

    every, some = entry("0.9.0", "0.10.0", "0.10.1", "0.11.0"), entry("0.9.0", "0.10.1", "0.11.0")
    assert release_runs([every, some], every) == ["0.9.0 to 0.11.0"]
    assert release_runs([every, some], some) == ["0.9.0", "0.10.1 to 0.11.0"]


@pytest.mark.parametrize(
    ("found", "gone"),
    [
        ({"m:f": "1", "m:g": "5"}, []),
        ({"m:f": "2", "m:h": "7"}, []),  # the second release has h, which the first has not, in place of g
        ({"m:f": "1"}, ["m:g"]),
        ({"m:f": "2"}, ["m:h"]),
        ({"m:h": "7"}, ["m:f"]),
        ({"m:f": "1", "m:h": "7"}, []),  # each as some release has it, and all that the second has
        ({"m:f": "9"}, []),  # as in no release, which is said of f
    ],
)
def test_a_target_is_gone_where_every_release_alike_has_it(found: dict[str, str], gone: list[str]):
    targets = [
        Target("m", "f", {"1.0": "1", "2.0": "2"}),
        Target("m", "g", {"1.0": "5"}),
        Target("m", "h", {"2.0": "7"}),
    ]
    assert list(map(str, missing(targets, found))) == gone
