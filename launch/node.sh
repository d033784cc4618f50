#!/usr/bin/env bash
# Runs one node of a job. Call it on each node, by hand, with torchrun.sh, or with srun (launch/slurm/).
#
#     NUM_NODES=2 NODE_RANK=0 RANKS_PER_NODE=8 MASTER_ADDRESS=node0 bash launch/node.sh recipes/x.yaml run.steps=10
#
# The script lets the doctor check all nodes, starts Ray (with the head on node 0), runs the trainer ranks, and ends
# everything that it started. Its exit status is the ranks' status: 0 complete, 75 saved and ready for another start, 2 bad
# input, any other status a failure. It passes a signal (TERM, USR1, HUP, INT) on to the ranks and waits for their end.
# Relative paths, including RECIPE and LOG_DIR, start at the checkout.
#
#   NUM_NODES        number of nodes of the job
#   NODE_RANK        number of this node, from 0
#   RANKS_PER_NODE   number of trainer ranks on each trainer node
#   MASTER_ADDRESS   name or address of node 0, for the other nodes
#   MASTER_PORT      port of torchrun's rendezvous on node 0 (29500)
#   RAY_PORT         port of Ray's head on node 0 (6379); Ray chooses all other ports
#   TRAINER_NODES    number of nodes with trainer ranks, which come first; the other nodes run only engines (NUM_NODES).
#                    TRAINER_NODES * RANKS_PER_NODE must be trainer.ranks of the recipe
#   NODE_ADDRESS     address of this node, if it differs from the address on the route to node 0
#   MAX_RESTARTS     how often all ranks restart from the last checkpoint when a rank dies (0)
#   JOIN_TIMEOUT_S   how long nodes wait for each other at the start (300)
#   LOG_DIR          directory for a log of each rank, and for Ray's logs if the job fails; without it there are no logs. It
#                    also gets node-N.pid, the process that takes signals, and at the end node-N.status and node-N.saved, the
#                    last checkpoint
#   OMP_NUM_THREADS, VLLM_CPU_OMP_THREADS_BIND
#                    threads of a process, and cores of vLLM's workers. If one is set, megarl does not bind processes to cores,
#                    as it otherwise does on CPUs
#   GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME, VLLM_HOST_IP
#                    network interface or address for messages (those of NODE_ADDRESS)
#   RAY_AUTH_MODE, RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH
#                    Ray's token, the same on all nodes (~/.ray/auth_token, which node 0 makes if it is missing)
set -euo pipefail
tree=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$tree"
python=.venv/bin/python
[ -x "$python" ] || python=python3
exec "$python" -m megarl.cluster.node "$@"
