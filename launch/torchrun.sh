#!/usr/bin/env bash
# Trains a recipe on several machines. Run it on each machine, with the same variables except NODE_RANK.
#
#     NUM_NODES=2 NODE_RANK=0 RANKS_PER_NODE=8 MASTER_ADDRESS=node0 bash launch/torchrun.sh recipes/x.yaml run.steps=10
#
# NUM_NODES * RANKS_PER_NODE must equal trainer.ranks of the recipe. MASTER_ADDRESS is a name or address of the first machine
# that the other machines reach. On one machine `megarl train RECIPE` does the same without variables. launch/node.sh does
# the work; it explains these variables and the optional variables. Relative paths start at the checkout.
set -euo pipefail
exec bash "$(dirname "${BASH_SOURCE[0]}")/node.sh" "$@"
