#!/bin/bash
# Runs all tests that are built. The simulation needs a processor, and tests on
# clusters mostly wait: so it runs beside them, and gives way.
#
#   tests/run.sh LOG CARGO-TEST-OF-THE-SIMULATION…
set -euo pipefail
log=$1
shift

# A session of its own, so that what it starts ends with it.
setsid nice -n 19 env "$@" >"$log" 2>&1 </dev/null &
simulation=$!
trap 'kill -- -$simulation 2>/dev/null || true' EXIT
trap 'exit 130' INT TERM

cargo test --locked
echo "waiting for the simulation"
status=0
wait "$simulation" || status=$?
cat "$log"
exit "$status"
