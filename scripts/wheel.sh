#!/usr/bin/env bash
# Builds the wheel for manylinux_2_28 and has auditwheel check it.
#   scripts/wheel.sh [profile] [folder]      profile: release (fat LTO, what ships) or ci (thin LTO, quick)
set -euo pipefail
cd "$(dirname "$0")/.."
profile=${1:-release} out=${2:-dist}

tools=.work/build-tools
if [ ! -e "$tools/.ready" ] || [ requirements/build.txt -nt "$tools/.ready" ]; then
    "${PYTHON:-python3}" scripts/check_python.py
    "${PYTHON:-python3}" -m venv "$tools"
    "$tools/bin/python" -m pip install --quiet -r requirements/build.txt
    touch "$tools/.ready"
fi
# maturin looks for zig through the first python on PATH, and for python in an activated environment before that.
unset VIRTUAL_ENV
export PATH="$PWD/$tools/bin:$PATH"

mkdir -p "$out"
rm -f "$out"/deepinfer-*.whl
maturin build --quiet --zig --compatibility manylinux_2_28 --profile "$profile" --out "$out"
wheel=$(echo "$out"/deepinfer-*.whl)
python scripts/check_wheel.py "$wheel"
echo "$wheel"
