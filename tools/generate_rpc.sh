#!/usr/bin/env bash
# Generates src/paceline/rpc/v1 from proto/. With --check, fails when the committed code differs.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
export PATH="$(dirname "$(readlink -f "$python" || echo "$python")"):$(dirname "$python"):$PATH"
"$python" -m grpc_tools.protoc -I proto --python_out="$out" --grpc_python_out="$out" \
  --mypy_out="quiet:$out" --mypy_grpc_out="quiet,only_async:$out" \
  proto/paceline/rpc/v1/*.proto
if [ "${1:-}" = "--check" ]; then
  status=0
  for file in "$out"/paceline/rpc/v1/*; do
    committed=src/paceline/rpc/v1/$(basename "$file")
    diff -u "$committed" "$file" >/dev/null || { echo "stale: $committed; run tools/generate_rpc.sh"; status=1; }
  done
  exit $status
fi
mkdir -p src/paceline/rpc/v1
cp "$out"/paceline/rpc/v1/* src/paceline/rpc/v1/
