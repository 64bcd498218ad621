#!/usr/bin/env bash
# Everything that needs a GPU, in under 8 minutes: the tests marked gpu, then benchmarks.gpu.check.
#
#   scripts/gpu_check.sh [FOLDER]        logs and tables go there; benchmarks/results/gpu by default
#
# PYTHON=... chooses the interpreter (.venv's if there is one); it needs torch with CUDA, megatron-core, pytest,
# rich, typer, matplotlib, numba, psutil and filelock, and where they are installed uses transformer-engine and apex.
# Nothing is fetched.
set -uo pipefail
cd "$(dirname "$0")/.." || exit
out=${1:-benchmarks/results/gpu}
python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
mkdir -p "$out"

"$python" -c 'import sys, torch; sys.exit(0 if torch.cuda.is_available() else
    "gpu_check.sh: torch sees no CUDA device; run it on a machine that has one")' || exit 1
"$python" -c 'from megatron_pp_ext.cli import app; app()' doctor >"$out/doctor.log" 2>&1
doctor=$?
timeout 150 "$python" -m pytest tests/gpu -m gpu -rs -p no:cacheprovider >"$out/tests.log" 2>&1
tests=$?
timeout 310 "$python" -m benchmarks.gpu.check --out "$out" >"$out/gpu.log" 2>&1
benchmarks=$?

cat "$out/gpu.md"
echo
printf '%-12s %s\n' doctor "$([ $doctor -eq 0 ] && echo ok || echo "status $doctor, see $out/doctor.log")"
printf '%-12s %s\n' tests "$(tail -n 1 "$out/tests.log")"
printf '%-12s %s\n' benchmarks "$([ $benchmarks -eq 0 ] && echo ok || echo "status $benchmarks, see $out/gpu.log")"
[ $doctor -eq 0 ] && [ $tests -eq 0 ] && [ $benchmarks -eq 0 ]
