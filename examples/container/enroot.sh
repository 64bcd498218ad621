#!/usr/bin/env bash
# Makes an enroot image with megatron_pp_ext, for pyxis: examples/container/enroot.sh [FILE.sqsh]
#
# BASE is the image that it starts from, as enroot spells it; NGC's PyTorch by default. CONTAINER=FILE.sqsh then lets the
# batch scripts of examples/ start their ranks in it.
set -euo pipefail
file=${1:-megatron-pp.sqsh}
base=${BASE:-docker://nvcr.io#nvidia/pytorch:25.10-py3}
root=$(cd "$(dirname "$0")/../.." && pwd)
name=megatron-pp-$$
if [ -e "$file" ]; then
    echo "enroot.sh: $file is there already: remove it, or name another file" >&2
    exit 2
fi
folder=$(mktemp -d)
trap 'enroot remove --force "$name" >/dev/null 2>&1 || true; rm -rf "$folder"' EXIT
enroot import --output "$folder/base.sqsh" "$base"
enroot create --name "$name" "$folder/base.sqsh"
# The package is copied by the script; the repository itself is seen only while it runs.
enroot start --root --rw --mount "$root:/opt/megatron_pp_ext" "$name" bash /opt/megatron_pp_ext/examples/container/install.sh
enroot export --output "$file" "$name"
echo "$file: CONTAINER=$PWD/$file for the scripts of examples/"
