#!/usr/bin/env bash
# Builds, tests and measures on a machine with GPUs, without network, and leaves at most 8 files in one folder:
#
#   tools/run_on_gpus.sh OUT                  all steps: build smoke tests bench nccl
#   tools/run_on_gpus.sh OUT build tests      only these, in this order
#   tools/run_on_gpus.sh OUT build sanitize   small shapes under compute-sanitizer; the releases' matrices: matrices
#   TESTS="-k graphs" BENCH="--sweep --tokens 128" tools/run_on_gpus.sh OUT build tests bench
#
# Each step has its own limit in seconds (LIMIT_BUILD=... and so on change it) and a failing one does not stop the
# others. What is tested is what was installed: tests and benchmarks run from a copy without the package's sources.
# Last comes a table; its exit status is 1 if any step failed.
set -uo pipefail
cd "$(dirname "$0")/.."
[[ $# -ge 1 ]] || { sed -n '2,12s/^# \{0,1\}//p' "$0"; exit 2; }

mkdir -p "$1"
out=$(cd "$1" && pwd)
shift
steps=("${@:-}")
[[ -n "${steps[0]}" ]] || steps=(build smoke tests bench nccl)
rm -f "$out"/{build,smoke,tests,bench,sanitize,matrices}.log
python=${PYTHON:-python3}
stage=$(mktemp -d)
trap 'rm -rf "$stage"' EXIT
cp -r tests benchmarks examples pyproject.toml "$stage/"
export PYTHONUNBUFFERED=1 GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-lo} MORI_TARGET=${MORI_TARGET:-cuda}
# Multicast over NVLink can put GPUs that others share out of service.
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1

build() {
  nvidia-smi --query-gpu=index,name,driver_version,clocks.sm,clocks.mem --format=csv || true
  nvidia-smi topo -m || true
  "$python" -m pip install --no-build-isolation --no-deps --force-reinstall .
}
smoke() { cd "$stage" && "$python" tests/gpu/smoke.py; }
tests() {
  # shellcheck disable=SC2086
  cd "$stage" && "$python" -m pytest -p tests.gpu.results --results "$out/gpu_tests.json" -m gpu tests/gpu \
    -q --durations=15 -p no:cacheprovider ${TESTS:-}
}
bench() {
  # shellcheck disable=SC2086
  cd "$stage" && "$python" -m benchmarks.bench_ep --output "$out/bench_ep.json" ${BENCH:-}
}
nccl() {
  # shellcheck disable=SC2086
  cd "$stage" && "$python" -m benchmarks.nccl_baseline --output "$out/nccl_baseline.json" ${NCCL:-}
}
sanitize() {
  # shellcheck disable=SC2086
  cd "$stage" && "$python" -m tests.gpu.sanitize --results "$out/sanitizer.json" ${SANITIZE:-}
}
matrices() {
  # shellcheck disable=SC2086
  cd "$stage" && "$python" -m pytest -p tests.gpu.results --results "$out/matrices.json" tests/python/ops \
    -q --durations=10 -p no:cacheprovider ${MATRICES:-}
}
export -f build smoke tests bench nccl sanitize matrices
export out stage python

declare -A limit=([build]=${LIMIT_BUILD:-110} [smoke]=${LIMIT_SMOKE:-40} [tests]=${LIMIT_TESTS:-280}
  [bench]=${LIMIT_BENCH:-100} [nccl]=${LIMIT_NCCL:-40} [sanitize]=${LIMIT_SANITIZE:-300}
  [matrices]=${LIMIT_MATRICES:-400})
table=""
failed=0
for step in "${steps[@]}"; do
  [[ -n "${limit[$step]:-}" ]] || { echo "no step $step: build smoke tests bench nccl sanitize matrices" >&2; exit 2; }
  log="$out/$step.log"
  [[ $step == nccl ]] && log="$out/bench.log" # eight files at most
  echo "== $step, at most ${limit[$step]} s"
  began=$SECONDS
  timeout --kill-after=10 "${limit[$step]}" bash -c "$step" >>"$log" 2>&1
  status=$?
  case $status in
    0) word=ok ;;
    124 | 137) word="cut short at its limit" ;;
    *) word="failed with status $status" ;;
  esac
  ((status == 0)) || { failed=1; tail -n 25 "$log"; }
  table+=$(printf '%-6s %4d s  %-24s %s' "$step" $((SECONDS - began)) "$word" \
    "$(grep -v '^[[:space:]]*$' "$log" | tail -n 1 | cut -c 1-90)")$'\n'
done
[[ -f "$out/bench.log" ]] && grep -E '^(mori|nccl|link) ' "$out/bench.log" | cut -c 1-170
printf '%s' "$table" | tee "$out/summary.txt"
exit $failed
