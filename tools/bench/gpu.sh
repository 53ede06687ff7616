#!/usr/bin/env bash
# Everything there is to run on one GPU, within 8 minutes: tests marked gpu, then tools.bench.gpu_bench.
#
#     tools/bench/gpu.sh [FOLDER]          results; default runs/bench
#     PYTHON=python3 tools/bench/gpu.sh    another Python than .venv's
#     LAYERS=4 PEAK_TFLOPS=990 tools/bench/gpu.sh
#
# What is left out is printed with its reason. Exit code: 0, 1 if a part failed or ran out of its time, 2 without a GPU.
# Not run on a GPU by this project.
set -u
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 1

out=${1:-runs/bench}
python=${PYTHON:-.venv/bin/python}
layers=${LAYERS:-8}
failed=0

if ! command -v "$python" >/dev/null; then
    echo "no Python at $python: make setup, or set PYTHON" >&2
    exit 1
fi
if ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "skipped: no GPU: torch.cuda.is_available() is False for $python" >&2
    exit 2
fi
mkdir -p "$out" || exit 1
export CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-0}
CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES%%,*}

part() {  # part NAME SECONDS COMMAND...
    local name=$1 seconds=$2 start=$SECONDS status
    shift 2
    echo "=== $name (at most $seconds s)"
    timeout --kill-after=10 "$seconds" "$@"
    status=$?
    case $status in
        0) echo "=== $name: done in $((SECONDS - start)) s" ;;
        124 | 137) echo "=== $name: stopped after $seconds s" >&2; failed=1 ;;
        *) echo "=== $name: failed with exit code $status" >&2; failed=1 ;;
    esac
}

for package in flash_attn transformer_engine; do
    "$python" -c "import $package" 2>/dev/null || echo "skipped: what needs $package, which does not import here"
done
part "tests marked gpu" 170 env NEOX_TEST_DEVICE=cuda "$python" -m pytest -m gpu tests/gpu -q -rs -p no:cacheprovider \
    --junitxml "$out/gpu_tests.xml"
bench=("$python" -m tools.bench.gpu_bench --out "$out" --layers "$layers" ${PEAK_TFLOPS:+--peak-tflops "$PEAK_TFLOPS"})
part "training step" 170 "${bench[@]}" --only train
part "decoding" 90 "${bench[@]}" --only decode
echo "results: $out/gpu_tests.xml $out/gpu_train.json $out/gpu_decode.json"
exit $failed
