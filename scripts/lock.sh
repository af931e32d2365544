#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Compiles requirements.lock, and requirements-libero.lock with what the extra `libero` adds to it: names, versions and
# hashes only, for every platform, whatever the local index settings.
#   scripts/lock.sh             keep the versions that still fit pyproject.toml
#   scripts/lock.sh --upgrade   take the newest that fit
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
uv=$([ -x .tools/bin/uv ] && echo .tools/bin/uv || command -v uv)

compile() {
  UV_CUSTOM_COMPILE_COMMAND="make lock" "$uv" pip compile pyproject.toml --quiet --universal --python-version 3.12 \
    --extra sims --extra pusht --extra groot --extra fp8 --extra sweep --extra logging --extra dev --generate-hashes \
    --no-emit-index-url --no-emit-find-links "$@"
}

# The entries of lock file $2 that lock file $1 has not; fails where they disagree on a version.
added_entries() {
  awk '
    /^[A-Za-z0-9]/ { split($1, pin, "=="); shown = 0 }
    FNR == NR { if (/^[A-Za-z0-9]/) version[pin[1]] = pin[2]; next }
    /^[A-Za-z0-9]/ {
      if (!(pin[1] in version)) shown = 1
      else if (version[pin[1]] != pin[2]) {
        printf "%s: locked at %s, but LIBERO needs %s\n", pin[1], version[pin[1]], pin[2] > "/dev/stderr"
        failed = 1
      }
    }
    /^#/ || shown
    END { exit failed }
  ' "$1" "$2"
}

compile --output-file requirements.lock "$@"
with_libero=$(mktemp)
trap 'rm -f "$with_libero"' EXIT
cp requirements.lock "$with_libero"  # its versions are kept
compile --extra libero --output-file "$with_libero"
added_entries requirements.lock "$with_libero" >requirements-libero.lock
if grep -nE '://|^--?(extra-)?(index|find-links|i |f )' requirements.lock requirements-libero.lock; then
  echo "a lock file records an address; take the local index setting out and compile again" >&2
  exit 1
fi
