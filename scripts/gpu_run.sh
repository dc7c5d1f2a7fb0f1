#!/usr/bin/env bash
# Runs a command with flashhopper importable on a machine with a GPU, torch, g++ and pybind11, without installing:
#   scripts/gpu_run.sh python3 -m pytest -m gpu tests/gpu
# Takes the library that scripts/stage_gpu.sh left in .carry/lib, compiles the Python module against it (10 s, kept in
# build/gpu until its sources change) and installs the wheels of .carry/wheels, if any, beside it.
set -euo pipefail
cd "$(dirname "$0")/.."
library=.carry/lib/libflashhopper.so
[ -f "$library" ] || { echo "no $library: run scripts/stage_gpu.sh first and carry .carry/ along" >&2; exit 1; }

# A package directory of its own: the sources by link, the binaries beside them, nothing left in python/.
package=build/gpu/package/flashhopper
rm -rf "$package"
mkdir -p "$package"
ln -s "$PWD"/python/flashhopper/* "$package/"
cp "$library" "$package/"

module="_C$(python3 -c 'import sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX"))')"
sources=(cpp/bindings/module.cpp cpp/bindings/*.hpp cpp/include/flashhopper/flashhopper.h)
if ! sha256sum --check --status build/gpu/module.sha256 2>/dev/null || [ ! -f "build/gpu/$module" ]; then
  includes="$(python3 -m pybind11 --includes)"
  # shellcheck disable=SC2086  # several options
  g++ -O2 -std=c++20 -shared -fPIC -fvisibility=hidden -Icpp/include $includes "${sources[0]}" \
    -o "build/gpu/$module" -L"$package" -lflashhopper '-Wl,-rpath,$ORIGIN'
  sha256sum "${sources[@]}" >build/gpu/module.sha256
fi
cp "build/gpu/$module" "$package/"

if compgen -G ".carry/wheels/*.whl" >/dev/null; then
  python3 -m pip install -q --no-index --no-deps --no-compile --upgrade --target build/gpu/site .carry/wheels/*.whl
fi
export PYTHONPATH="$PWD/build/gpu/package:$PWD:$PWD/build/gpu/site${PYTHONPATH:+:$PYTHONPATH}"
exec "$@"
