#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Compiles requirements.lock: names, versions and hashes only, for every platform, whatever the local index settings.
#   scripts/lock.sh             keep the versions that still fit pyproject.toml
#   scripts/lock.sh --upgrade   take the newest that fit
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
uv=$([ -x .tools/bin/uv ] && echo .tools/bin/uv || command -v uv)
UV_CUSTOM_COMPILE_COMMAND="make lock" "$uv" pip compile pyproject.toml --quiet --universal --python-version 3.12 \
  --extra sims --extra groot --extra sweep --extra logging --extra dev --generate-hashes \
  --no-emit-index-url --no-emit-find-links --output-file requirements.lock "$@"
if grep -nE '://|^--?(extra-)?(index|find-links|i |f )' requirements.lock; then
  echo "requirements.lock records an address; take the local index setting out and compile again" >&2
  exit 1
fi
