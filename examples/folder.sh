#!/bin/sh
# Normalize a folder of activations with one norm of a checkpoint. Run again, it goes on where it ended:
#   sh folder.sh FOLDER CHECKPOINT SITE OUTPUT_DIR
set -eu
layernorm batch "$1" --params "$2" --site "$3" --output-dir "$4" --resume --manifest "$4.jsonl"
