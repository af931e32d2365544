#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Compiles requirements.lock, and requirements-libero.lock and requirements-rl.lock with what the extras `libero` and `rl`
# add to it: names, versions and hashes only, for every platform, whatever the local index settings.
#   scripts/lock.sh             keep the versions that still fit pyproject.toml
#   scripts/lock.sh --upgrade   take the newest that fit
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
uv=$([ -x .tools/bin/uv ] && echo .tools/bin/uv || command -v uv)

compile() {
  UV_CUSTOM_COMPILE_COMMAND="make lock" "$uv" pip compile pyproject.toml --quiet --universal --python-version 3.12 \
    --extra sims --extra pusht --extra groot --extra lora --extra fp8 --extra deepspeed --extra sweep --extra logging --extra dev \
    --generate-hashes --no-emit-index-url --no-emit-find-links "$@"
}

# The entries of lock file $2, of the extra $3, that lock file $1 has not; fails where they disagree on a version.
added_entries() {
  awk -v extra="$3" '
    /^[A-Za-z0-9]/ { split($1, pin, "=="); shown = 0 }
    FNR == NR { if (/^[A-Za-z0-9]/) version[pin[1]] = pin[2]; next }
    /^[A-Za-z0-9]/ {
      if (!(pin[1] in version)) shown = 1
      else if (version[pin[1]] != pin[2]) {
        printf "%s: locked at %s, but the extra %s needs %s\n", pin[1], version[pin[1]], extra, pin[2] > "/dev/stderr"
        failed = 1
      }
    }
    /^#/ || shown
    END { exit failed }
  ' "$1" "$2"
}

compile --output-file requirements.lock "$@"
with_extra=$(mktemp)
trap 'rm -f "$with_extra"' EXIT
for extra in libero rl; do
  cp requirements.lock "$with_extra"  # its versions are kept
  compile --extra "$extra" --output-file "$with_extra"
  added_entries requirements.lock "$with_extra" "$extra" >"requirements-$extra.lock"
done
if grep -nE '://|^--?(extra-)?(index|find-links|i |f )' requirements*.lock; then
  echo "a lock file records an address; take the local index setting out and compile again" >&2
  exit 1
fi
