#!/bin/sh
# A folder of activations over the workers of a Dask cluster, which see the same files as this machine:
#   sh dask.sh FOLDER OUTPUT_DIR tcp://SCHEDULER:8786 [options of layernorm batch, such as --gamma gamma.npy]
# A scheduler and workers are started so, on any machine with layernorm[dask] installed:
#   dask scheduler
#   dask worker tcp://SCHEDULER:8786
# Workers may come and go; run again after any end, it goes on where it ended.
set -eu
folder=$1 output_dir=$2 scheduler=$3
shift 3
exec layernorm batch "$folder" --output-dir "$output_dir" --engine dask --scheduler "$scheduler" \
    --resume --manifest "$output_dir.jsonl" "$@"
