#!/usr/bin/env bash
# Installs megatron_pp_ext and what training needs into this machine, as the last step of an image's recipe.
#
# A torch that is there stays as it is, with all that was compiled for it. Without one, an environment in /opt/venv (or
# VENV) gets torch, Megatron and, unless ENGINE=0, Transformer Engine, which is compiled for the image's CUDA.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
python=${PYTHON:-python3}
sources=$(mktemp -d)
trap 'rm -rf "$sources"' EXIT
# A build leaves files beside the sources, which may be mounted to be read only.
cp -r "$root/pyproject.toml" "$root/README.md" "$root/LICENSE" "$root/megatron_pp_ext" "$sources"

if "$python" -c 'import torch' 2>/dev/null; then
    "$python" -c 'import torch; print(f"torch=={torch.__version__}")' >"$sources/stays.txt"
    "$python" -m pip install --no-cache-dir --constraint "$sources/stays.txt" "$sources"
    "$python" -c 'import megatron.core' 2>/dev/null ||
        "$python" -m pip install --no-cache-dir --constraint "$sources/stays.txt" \
            'megatron-core[training]>=0.16.0rc0,<0.21'
else
    if ! "$python" -m venv --help >/dev/null 2>&1 || ! "$python" -c 'import ensurepip' 2>/dev/null; then
        apt-get update
        DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
            python3 python3-venv python3-dev build-essential git
        rm -rf /var/lib/apt/lists/*
    fi
    venv=${VENV:-/opt/venv}
    "$python" -m venv "$venv"
    python=$venv/bin/python
    "$python" -m pip install --no-cache-dir "${sources}[train]"
    if [ "${ENGINE:-1}" != 0 ]; then
        "$python" -m pip install --no-cache-dir setuptools wheel ninja pybind11
        "$python" -m pip install --no-cache-dir --no-build-isolation "${sources}[train,gpu]"
    fi
fi
cd /
# What a machine with GPUs needs shows there; hooks, packages and versions show here.
"$python" -m megatron_pp_ext.cli doctor || echo "install.sh: run mpp doctor again where the GPUs are"
