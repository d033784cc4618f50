#!/usr/bin/env bash
# Trains one recipe on several machines: run this on each of them, with the same variables but NODE_RANK.
#
#     NUM_NODES=2 NODE_RANK=0 RANKS_PER_NODE=8 MASTER_ADDRESS=node0 bash launch/torchrun.sh recipes/x.yaml run.steps=10
#
# NUM_NODES * RANKS_PER_NODE must equal trainer.ranks of the recipe. MASTER_ADDRESS is the first machine, by a
# name or address that the others reach. On one machine `megarl train RECIPE` does the same with nothing to set.
# launch/node.sh, which does the work, explains these variables and those that may be set besides. Relative paths begin at the
# checkout.
set -euo pipefail
exec bash "$(dirname "${BASH_SOURCE[0]}")/node.sh" "$@"
