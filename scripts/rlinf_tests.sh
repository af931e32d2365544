#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# RLinf's own unit tests that need neither an accelerator nor Ray, with embodix's patches in force: they must pass as
# they do without. They are not in RLinf's wheel, so a checkout of RLinf at v0.3 is needed; only its tests are used, not
# its package.
#   scripts/rlinf_tests.sh <checkout> [pytest arguments]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

checkout=${1:-}
if [ -z "$checkout" ] || [ ! -d "$checkout/tests/unit_tests" ]; then
  echo "give a checkout of RLinf at v0.3, which has tests/unit_tests: make rlinf-tests CHECKOUT=<path>" >&2
  exit 2
fi
shift
tests=$(cd "$checkout/tests/unit_tests" && pwd)
python=${EMBODIX_PYTHON:-$PWD/.venv/bin/python}
files=()
for name in custom_model_registration comm_mapper placement weight_syncer overlap_env_bootstrap history_manager rot6d \
  robotwin_seed_partition value_model_embedding_scale math_dataset_multithread nvidia_profiling; do
  files+=("test_$name.py")
done
cd "$tests"
OMP_NUM_THREADS=1 PYTHONPATH="$tests" "$python" -m pytest -q -p embodix_rl.testing.rlinf_patches -p no:cacheprovider \
  "${files[@]}" "$@"
