#!/usr/bin/env bash
# Run all measurements on a GPU in one command, in under nine minutes.
#
#   bench/lab/gpu_check.sh               all stages, most important first; writes bench/results/gpu-*.json
#                                    and docs/gpu-results.md, and copies both to $OUT if it is set
#   bench/lab/gpu_check.sh --rehearse    tiny shapes on the CPU; results are not kept
#   bench/lab/gpu_check.sh --only decode verify
#   bench/lab/gpu_check.sh --pack        download the packages that a machine with PyTorch may lack into
#                                    .gpu-wheels, to be copied to a machine that cannot install them
#
# python -m foretoken.bench.lab.gpu.page --from gpu-check.json imports results that another machine
# wrote to $OUT.
#
# Needs only the repository, and Python 3.12 with PyTorch, Triton and the packages below.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
python=${PYTHON:-python3}
wheels=${GPU_WHEELS:-$root/.gpu-wheels}
packed="msgspec llguidance gguf"
needed="torch triton numpy transformers safetensors sortedcontainers prometheus_client jinja2
        pytest xdist hypothesis $packed"

if [ "${1:-}" = --pack ]; then
  rm -rf "$wheels"
  platforms="--platform manylinux2014_x86_64"
  for minor in $(seq 17 39); do # pip matches the exact version of glibc
    platforms="$platforms --platform manylinux_2_${minor}_x86_64"
  done
  for name in $packed; do
    version=$(sed -n "s/^$name==//p" "$root/constraints.txt")
    "$python" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: \
      --python-version 3.12 --implementation cp $platforms \
      --dest "$wheels" "$name==$version"
  done
  ls "$wheels"
  exit
fi

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
mkdir "$scratch/site"
ln -s "$root" "$scratch/site/foretoken" # the repository's root is the package
export PYTHONPATH=$scratch/site${PYTHONPATH:+:$PYTHONPATH}

absent() {
  "$python" - $needed <<'PY'
import sys
from importlib.util import find_spec

print(*(name for name in sys.argv[1:] if find_spec(name) is None))
PY
}

if [ -n "$(absent)" ] && [ -d "$wheels" ]; then
  "$python" -m pip install --quiet --disable-pip-version-check --no-index --no-deps --no-compile \
    --root-user-action=ignore --no-cache-dir --target "$scratch/site" "$wheels"/*.whl
fi
missing=$(absent)
if [ -n "$missing" ]; then
  echo "gpu_check: missing packages: $missing; install them, or carry them: bench/lab/gpu_check.sh --pack" >&2
  exit 2
fi

"$python" -m foretoken.bench.lab.gpu.check "$@"
