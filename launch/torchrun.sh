#!/usr/bin/env bash
# Trains one recipe on several machines: run this on each of them, with the same variables.
#
#     NUM_NODES=2 NODE_RANK=0 RANKS_PER_NODE=8 MASTER_ADDRESS=node0 bash launch/torchrun.sh recipes/x.yaml run.steps=10
#
# NUM_NODES * RANKS_PER_NODE must equal trainer.ranks of the recipe. MASTER_ADDRESS is the first machine, by a
# name or address that the others reach. On one machine `megarl train RECIPE` does the same with nothing to set.
# More than one machine: only with rollout.replay so far, and not yet run. The weight sync goes through shared memory and
# refuses ranks of another machine than rank 0's, which starts the engines.
set -euo pipefail
: "${NUM_NODES:?how many machines}" "${NODE_RANK:?which of them this is, from 0}"
: "${RANKS_PER_NODE:?trainer ranks on each}" "${MASTER_ADDRESS:?the first machine}"
[ $# -ge 1 ] || { echo "usage: torchrun.sh RECIPE [key=value ...] [--resume]" >&2; exit 2; }

cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=.venv/bin/python
[ -x "$python" ] || python=python3
# One thread a rank unless the caller knows better: ranks that share cores must not spin on each other.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec "$python" -m torch.distributed.run \
    --nnodes "$NUM_NODES" --node-rank "$NODE_RANK" --nproc-per-node "$RANKS_PER_NODE" \
    --master-addr "$MASTER_ADDRESS" --master-port "${MASTER_PORT:-29500}" \
    -m megarl.train "$@"
