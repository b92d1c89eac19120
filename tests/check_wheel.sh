#!/usr/bin/env bash
# The built wheel, alone in an empty environment: `status` says that there is no vLLM, the ledger is in it, and the page
# of an audit.
#   tests/check_wheel.sh UV [OPTIONS OF uv pip install]
set -euo pipefail
uv=$(realpath "$1")
options=${2:-}
samples=$(realpath "$(dirname "$0")/support")
room=$(mktemp -d)
trap 'rm -rf "$room"' EXIT

"$uv" build --quiet --wheel --out-dir "$room" .
"$uv" venv --quiet "$room/empty"
install=("$uv" pip install --quiet --python "$room/empty/bin/python")
# shellcheck disable=SC2086
"${install[@]}" --no-index --no-deps $options 'torch==2.13.0+cpu' 2>/dev/null || "${install[@]}" --torch-backend cpu torch
# shellcheck disable=SC2086
"${install[@]}" $options "$room"/*.whl
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
