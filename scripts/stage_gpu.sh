#!/usr/bin/env bash
# Prepares .carry/ (ignored by git) for scripts/gpu_run.sh on a machine with a GPU and no network:
#   scripts/stage_gpu.sh [REQUIREMENT...]
# builds the library into .carry/lib (narrowed by HEAD_DIMS and DTYPES, as in setup.sh) and downloads the wheels of the
# requirements, without their dependencies, into .carry/wheels for Python GPU_PYTHON (3.12).
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/build_library.sh .carry/lib

platforms=()
for glibc in 34 31 28 27 17; do platforms+=(--platform "manylinux_2_${glibc}_x86_64"); done
for requirement in "$@"; do
  .venv/bin/python -m pip download -q --no-deps --only-binary=:all: --implementation cp \
    --python-version "${GPU_PYTHON:-3.12}" "${platforms[@]}" --platform manylinux2014_x86_64 \
    --dest .carry/wheels "$requirement"
done
du -sh .carry/*
