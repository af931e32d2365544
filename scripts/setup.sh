#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Makes .venv ready on a bare Linux machine: system packages, Python, uv, the locked packages, embodix itself.
# Says what it does; does nothing when everything is in place. `make setup`, `make demo` and `make test` call it.
#
#   EMBODIX_PYTHON=/path/to/python   use this interpreter (3.12 or 3.13)
#   EMBODIX_SKIP_SYSTEM_CHECK=1      do not look for system packages
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly VENV=.venv
readonly TOOLS=.tools
readonly STAMP=$VENV/.embodix-setup
readonly LOCK=requirements.lock
readonly UV_VERSION=0.13.9
export UV_HTTP_TIMEOUT=${UV_HTTP_TIMEOUT:-300}
# The system's certificates hold a proxy's own ones too, which those that uv carries do not.
[ ! -e /etc/ssl/certs/ca-certificates.crt ] || export UV_SYSTEM_CERTS=${UV_SYSTEM_CERTS:-true}

say() { printf 'setup: %s\n' "$*" >&2; }
fail() { printf 'setup: error: %s\n' "$*" >&2; exit 1; }

# --- system packages ------------------------------------------------------------------------------------------------

has_library() { { ldconfig -p 2>/dev/null || /sbin/ldconfig -p; } | grep -qF "$1"; }

# One line a Debian package that is not there, found by what it provides, so that other distributions pass too.
missing_system_packages() {
  local entry
  for entry in libegl1:libEGL.so.1 libegl-mesa0:libEGL_mesa.so.0 libgl1:libGL.so.1 libgles2:libGLESv2.so.2 \
    libopengl0:libOpenGL.so.0 libosmesa6:libOSMesa.so; do
    has_library "${entry#*:}" || echo "${entry%%:*}"
  done
  command -v ffmpeg >/dev/null || echo ffmpeg
  command -v cc >/dev/null || echo gcc
  command -v git >/dev/null || echo git
  [ -e /usr/include/linux/input.h ] || echo linux-libc-dev
  [ -e /usr/include/stdlib.h ] || echo libc6-dev
}

apt_install() {
  say "installing with apt-get: $*"
  DEBIAN_FRONTEND=noninteractive apt-get update -qq >/dev/null || say "apt-get update failed; trying with the old lists"
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >/dev/null
}

ensure_system_packages() {
  [ -z "${EMBODIX_SKIP_SYSTEM_CHECK:-}" ] || return 0
  local missing
  missing=$(missing_system_packages | tr '\n' ' ')
  [ -n "$missing" ] || return 0
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    # shellcheck disable=SC2086  # a list of package names
    apt_install $missing || fail "apt-get could not install: $missing"
    return 0
  fi
  fail "these system packages are missing (Debian names) and only root can install them: $missing
  run:  sudo apt-get install -y $missing
  or set EMBODIX_SKIP_SYSTEM_CHECK=1 if your system provides them under other names"
}

# --- Python ---------------------------------------------------------------------------------------------------------

# Running it is the only safe test: a pyenv shim exists for versions that are installed but not selected.
python_fits() {
  "$1" -c 'import sys, ssl, ctypes, bz2, lzma, sqlite3, zlib
sys.exit(not (sys.implementation.name == "cpython" and (3, 12) <= sys.version_info[:2] < (3, 14)))' >/dev/null 2>&1
}

python_candidates() {
  local pyenv_root=${PYENV_ROOT:-$HOME/.pyenv} version
  [ -z "${EMBODIX_PYTHON:-}" ] || echo "$EMBODIX_PYTHON"
  for version in 3.12 3.13; do
    command -v "python$version" || true
    ls -d "$pyenv_root"/versions/"$version"*/bin/python /usr/local/bin/"python$version" /opt/python*/bin/"python$version" \
      "${XDG_DATA_HOME:-$HOME/.local/share}"/uv/python/cpython-"$version"*/bin/python 2>/dev/null || true
  done
  command -v python3 || true
  [ -z "${CONDA_PREFIX:-}" ] || echo "$CONDA_PREFIX/bin/python"
  ls -d "$HOME"/{miniconda3,anaconda3,miniforge3,mambaforge}/{,envs/*/}bin/python 2>/dev/null || true
}

find_python() {
  local candidate
  if [ -n "${EMBODIX_PYTHON:-}" ] && ! python_fits "$EMBODIX_PYTHON"; then
    fail "EMBODIX_PYTHON=$EMBODIX_PYTHON is not a working CPython 3.12 or 3.13; unset it or name another"
  fi
  while read -r candidate; do
    if python_fits "$candidate"; then
      "$candidate" -c 'import os, sys; print(os.path.realpath(sys.executable))'
      return 0
    fi
  done < <(python_candidates)
  return 1
}

fetch_python() {
  say "no CPython 3.12 or 3.13 found (looked on PATH, in pyenv, conda, /usr/local, /opt); fetching 3.12 with uv"
  "$UV" python install 3.12 && return 0
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    say "uv could not fetch it; trying apt-get"
    apt_install python3.12-dev || apt_install python3.13-dev || true
  fi
}

ensure_python() {
  PYTHON=$(find_python) || { fetch_python && PYTHON=$(find_python); } ||
    fail "no CPython 3.12 or 3.13, and none could be fetched; install one and set EMBODIX_PYTHON to its path"
  say "using $("$PYTHON" -V) at $PYTHON"
  ensure_python_headers
}

ensure_python_headers() {
  local include
  include=$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_paths()["include"])')
  [ -e "$include/Python.h" ] && return 0
  local headers
  headers="$("$PYTHON" -c 'import sys; print("python%d.%d-dev" % sys.version_info[:2])')"
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    apt_install "$headers" || fail "apt-get could not install $headers, which holds the headers of $PYTHON"
  else
    fail "the C headers of $PYTHON are missing; run: sudo apt-get install -y $headers"
  fi
}

# --- uv -------------------------------------------------------------------------------------------------------------

ensure_uv() {
  local found
  for found in "$TOOLS/bin/uv" "$(command -v uv || true)"; do
    if [ -n "$found" ] && "$found" --version >/dev/null 2>&1; then
      UV=$found
      return 0
    fi
  done
  local base
  base=$(find_python || command -v python3 || true)
  if [ -z "$base" ] || ! "$base" -m venv --clear "$TOOLS" >/dev/null 2>&1; then
    [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null ||
      fail "python3 with its venv module is needed; run: sudo apt-get install -y python3 python3-venv"
    apt_install python3 python3-venv
    base=/usr/bin/python3
    "$base" -m venv --clear "$TOOLS"
  fi
  say "installing uv $UV_VERSION into $TOOLS"
  "$TOOLS/bin/python" -m pip install --quiet --disable-pip-version-check "uv==$UV_VERSION"
  UV=$TOOLS/bin/uv
}

# --- the environment ------------------------------------------------------------------------------------------------

fingerprint() { cat "$LOCK" pyproject.toml scripts/setup.sh | sha256sum | cut -d' ' -f1; }

is_ready() {
  [ -f "$STAMP" ] && [ "$(cat "$STAMP")" = "$(fingerprint) $PWD" ] && python_fits "$VENV/bin/python"
}

install_environment() {
  if ! python_fits "$VENV/bin/python"; then
    say "creating $VENV"
    "$UV" venv --quiet --clear --python "$PYTHON" "$VENV"
  fi
  say "installing the locked packages (about 9 GB on disk; a first run downloads 3 GB)"
  "$UV" pip install --quiet --python "$VENV/bin/python" --require-hashes -r "$LOCK"
  "$UV" pip install --quiet --python "$VENV/bin/python" --no-deps --no-build-isolation -e .
  printf '%s %s\n' "$(fingerprint)" "$PWD" >"$STAMP"
}

main() {
  ensure_system_packages
  if is_ready; then
    say "$VENV is up to date"
    return 0
  fi
  rm -f "$STAMP"
  ensure_uv
  ensure_python
  install_environment
  say "done in ${SECONDS} s"
}

main
