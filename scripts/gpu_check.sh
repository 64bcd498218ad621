#!/usr/bin/env bash
# What needs a GPU, in parts, each of which is done in less than five minutes and writes its table as it goes.
#
#   scripts/gpu_check.sh [--out FOLDER] [--dry] [PART[:ROW,...] ...]
#
# The parts are doctor, tests, split, beside, gaps, away, away-one-queue, rates, parity, rehearse, offload, fp8, graphs,
# cp, ep and ddp; all run without any. FOLDER, which is benchmarks/results/gpu by default, gets a table for each part and one
# archive of all logs. SIGTERM ends what is being measured, and what was measured stays.
#
# PYTHON=... chooses the interpreter (.venv's if there is one); it needs torch with CUDA, megatron-core, pytest, rich,
# typer, matplotlib, numba, psutil and filelock, and where they are installed uses transformer-engine and apex.
# scripts/gpu_wheels.sh packs those that a machine without a network lacks. Nothing is fetched.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
exec "$python" -m benchmarks.gpu.check "$@"
