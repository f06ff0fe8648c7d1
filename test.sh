#!/usr/bin/env bash
# Runs every test: Rust (units, parity, golden, services) and end to end (the real binary with a real model, driven by the
# official OpenAI client). Fetches the default model (93 MB, once) and, into .venv, the Python packages that the latter need.
#
#   ./test.sh            everything
#   ./test.sh --quick    the Rust tests only, without the model
set -euo pipefail
cd "$(dirname "$0")"

if [ "${1:-}" = --quick ]; then
  exec cargo test --release --workspace
fi

# One build for tests and binary: naming the workspace both times keeps Cargo from building dependencies twice.
cargo build --release --workspace --all-targets
bin=target/release/quire
QUIRE_MODEL=${QUIRE_MODEL:-$("$bin" pull smollm2:135m)}
export QUIRE_MODEL
[ -d ../shared/fixtures ] && export QUIRE_FIXTURES=${QUIRE_FIXTURES:-$PWD/../shared/fixtures}

cargo test --release --workspace
# The same once more with a step planned ahead of the one under way.
QUIRE_STEP_AHEAD=1 cargo test --release --workspace --test engine --test service

if ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
  python3 -m venv .venv
fi
.venv/bin/python -m pip install --quiet --disable-pip-version-check -r tests/e2e/requirements.txt
# By its alias, so that the alias and the cache are tested too.
env -u QUIRE_MODEL .venv/bin/python -m pytest -q -rA --no-header -p no:cacheprovider tests/e2e "$@"
QUIRE_STEP_AHEAD=1 env -u QUIRE_MODEL .venv/bin/python -m pytest -q --no-header -p no:cacheprovider tests/e2e "$@"
