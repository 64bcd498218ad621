#!/usr/bin/env bash
# Packs the wheels that a machine without a network lacks for this project (megatron-core, above all), and prints how
# to use them there. It runs where there is a network, and needs what `make env` installs.
#
#   scripts/gpu_wheels.sh LIST [FOLDER]
#
# LIST has the packages of that machine, as `pip list` prints them there; FOLDER, which is wheels by default, gets the
# wheels of what is missing in it, in the versions that are installed here. They are those for Python 3.12 on x86-64
# Linux: megatron-core's has a compiled helper for its data sets.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
[ $# -ge 1 ] || { sed -n 's/^#   //p' "$0"; exit 2; }
list=$1 folder=${2:-wheels}
python=${PYTHON:-$([ -x "$root/.venv/bin/python" ] && echo "$root/.venv/bin/python" || echo python3)}

missing=$("$python" "$root/scripts/missing_packages.py" "$list")
if [ -z "$missing" ]; then
    echo "gpu_wheels.sh: nothing is missing in $list"
    exit
fi
mkdir -p "$folder"
# pip takes a platform word by word; the numbers are those of glibc.
platforms=()
for glibc in 28 27 26 24 17 12 5; do platforms+=(--platform "manylinux_2_${glibc}_x86_64"); done
for year in 2014 2010 1; do platforms+=(--platform "manylinux${year}_x86_64"); done
# shellcheck disable=SC2086  # a word for each package
"$python" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: \
    --python-version 3.12 --implementation cp "${platforms[@]}" --dest "$folder" $missing

printf '%s has %s wheels, %s\n' "$folder" "$(find "$folder" -name '*.whl' | wc -l)" "$(du -sh "$folder" | cut -f1)"
cat <<END
Carry it along, and run there:

    python3 -m pip install --no-index --no-deps --target carried $folder/*.whl
    PYTHONPATH=\$PWD/carried scripts/gpu_check.sh
END
