#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs RLinf and Ray into .venv, for `lerobot rl`. Does nothing when both are there in the locked versions.
# `make rl` calls it after scripts/setup.sh.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly PYTHON=.venv/bin/python
readonly LOCK=requirements-rl.lock
uv=$([ -x .tools/bin/uv ] && echo .tools/bin/uv || command -v uv)
export UV_HTTP_TIMEOUT=${UV_HTTP_TIMEOUT:-300}
[ ! -e /etc/ssl/certs/ca-certificates.crt ] || export UV_SYSTEM_CERTS=${UV_SYSTEM_CERTS:-true}

printf 'rl: installing the locked packages (0.35 GB on disk; a first run downloads 0.1 GB)\n' >&2
# Without dependencies: the lock names all of them, and nothing that requirements.lock has installed may move.
"$uv" pip install --quiet --python "$PYTHON" --no-deps --require-hashes -r "$LOCK"
