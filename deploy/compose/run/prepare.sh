#!/bin/sh
# Makes the arithmetic demo's data and its starting model in the volumes, once.
#   prepare.sh [SEED [sft.key=value ...]]
set -eu
seed=${1:-0}
[ $# -eq 0 ] || shift
made=models/arithmetic/start.seed$seed
if [ -f "$made" ] && [ -f models/arithmetic/start/config.json ]; then
  echo "prepare: data and model are there already"
  exit 0
fi
python examples/arithmetic/prepare.py --out data/arithmetic --model-out models/arithmetic/model --seed "$seed"
paceline sft examples/arithmetic/sft.yaml "seed=$seed" sft.train_files=data/arithmetic/sft.parquet \
  sft.output=models/arithmetic/start model.path=models/arithmetic/model "$@"
touch "$made"
