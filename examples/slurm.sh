#!/bin/bash
#SBATCH --job-name=layernorm
#SBATCH --array=1-8
#SBATCH --cpus-per-task=4
#SBATCH --requeue
# Eight tasks share the files of a folder, each the eighth part of them:
#   sbatch slurm.sh FOLDER OUTPUT_DIR [options of layernorm batch, such as --gamma gamma.npy]
# A task that is requeued, or a job sent again with all its tasks, goes on where it ended. A part of the
# tasks is sent again with --shard 3/8 in place of --shard slurm, since Slurm then counts that part only.
set -eu
folder=$1 output_dir=$2
shift 2
exec layernorm batch "$folder" --output-dir "$output_dir" --shard slurm --resume \
    --manifest "$output_dir.$SLURM_ARRAY_TASK_ID.jsonl" "$@"
