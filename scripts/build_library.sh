#!/usr/bin/env bash
# Builds libflashhopper.so alone and copies it: scripts/build_library.sh DESTINATION_DIRECTORY
# For what packages one library more than once: a wheel for each Python (cibuildwheel), a machine with a GPU
# (stage_gpu.sh). PYTHON, HEAD_DIMS and DTYPES as in setup.sh.
set -euo pipefail
destination="$(realpath -m "${1:?usage: build_library.sh DESTINATION_DIRECTORY}")"
cd "$(dirname "$0")/.."
scripts/setup.sh --toolchain
export PATH="$PWD/.venv/bin:$PATH"

unset FLASHHOPPER_LIBRARY  # the file that this script makes
cmake -G Ninja -S . -B build/library -DCMAKE_BUILD_TYPE=Release -DPython_EXECUTABLE="$PWD/.venv/bin/python" \
  -DFLASHHOPPER_HEAD_DIMS="${HEAD_DIMS:-}" -DFLASHHOPPER_DTYPES="${DTYPES:-fp16;bf16}"
cmake --build build/library --target flashhopper
mkdir -p "$destination"
cp build/library/libflashhopper.so "$destination/"
