#!/usr/bin/env bash
# Builds flashhopper and installs it, editable, into .venv. Each step does only what is missing: run it again after a
# change. Used by the Makefile and by .ci/run. `setup.sh --toolchain` stops once .venv can build (no torch, no install).
#   PYTHON      interpreter of a new .venv (python3)
#   EXTRAS      optional dependencies to install (test)
#   HEAD_DIMS   narrow a development build, e.g. "64;128" (all)
#   DTYPES      likewise, e.g. bf16 (fp16;bf16)
set -euo pipefail
cd "$(dirname "$0")/.."
python="${PYTHON:-python3}"

has_system_packages() {
  command -v g++ >/dev/null && command -v make >/dev/null && "$python" - <<'PY'
import ensurepip, os, sys, sysconfig, venv
header = os.path.join(sysconfig.get_path("include"), "Python.h")
sys.exit(sys.version_info < (3, 10) or not os.path.exists(header))
PY
}

install_system_packages() {
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -yqq --no-install-recommends g++ make python3 python3-dev python3-venv
  fi
  has_system_packages || {
    echo "flashhopper needs g++, make and $python >= 3.10 with its headers and venv" \
      "(Debian: apt-get install g++ make python3-dev python3-venv)" >&2
    exit 1
  }
}

has_system_packages 2>/dev/null || install_system_packages
[ -x .venv/bin/python ] || "$python" -m venv .venv
export PATH="$PWD/.venv/bin:$PATH" PIP_DISABLE_PIP_VERSION_CHECK=1
pip() { python -m pip "$@"; }

# The build runs in this environment rather than in isolation: paths stay the same from build to build, so that a
# change recompiles what depends on it and nothing else.
pip install -q "scikit-build-core>=0.11" "pybind11>=2.13" "cmake>=3.26" "ninja>=1.10"
requirements="$(python _build_backend/toolchain.py requirements)"
while read -r requirement; do
  case "$requirement" in
    "") ;;
    # Only its headers are of use; its dependencies (numpy, scipy, CUDA bindings) are not.
    nvidia-cutlass*) pip install -q --no-deps "$requirement" ;;
    *) pip install -q "$requirement" ;;
  esac
done <<<"$requirements"
if [ "${1:-}" = --toolchain ]; then exit; fi

# Any torch >= 2.9 will do; without a GPU take the release that continuous integration pins.
python -c "import torch" 2>/dev/null || {
  if nvidia-smi >/dev/null 2>&1; then pip install -q "torch>=2.9"; else pip install -q "torch==2.13.0"; fi
}

pip install -v --no-build-isolation --editable ".[${EXTRAS:-test}]" \
  --config-settings=build-dir=build/dev \
  --config-settings=cmake.define.FLASHHOPPER_BUILD_TESTS=ON \
  --config-settings=cmake.define.FLASHHOPPER_WERROR=ON \
  --config-settings="cmake.define.FLASHHOPPER_HEAD_DIMS=${HEAD_DIMS:-}" \
  --config-settings="cmake.define.FLASHHOPPER_DTYPES=${DTYPES:-fp16;bf16}"
