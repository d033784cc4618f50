#!/usr/bin/env bash
# One node of a job: run it on each of them, by hand, with torchrun.sh, or with srun (launch/slurm/).
#
#     NUM_NODES=2 NODE_RANK=0 RANKS_PER_NODE=8 MASTER_ADDRESS=node0 bash launch/node.sh recipes/x.yaml run.steps=10
#
# It has the doctor look at all nodes, starts Ray (its head on node 0), runs the trainer ranks, and ends all it started. Its exit
# status is that of the ranks: 0 complete, 75 saved and to be started again, 2 bad input, else a failure. A signal (TERM,
# USR1, HUP, INT) goes on to the ranks, and is waited for. Relative paths, RECIPE and LOG_DIR too, begin at the checkout.
#
#   NUM_NODES        nodes of the job
#   NODE_RANK        which of them this is, from 0
#   RANKS_PER_NODE   trainer ranks on each trainer node
#   MASTER_ADDRESS   name or address of node 0, as the others reach it
#   MASTER_PORT      where torchrun's agents meet on node 0 (29500)
#   RAY_PORT         where Ray's head listens on node 0 (6379); all other ports are chosen by Ray
#   TRAINER_NODES    the first so many nodes have trainer ranks, the others engines alone (NUM_NODES);
#                    TRAINER_NODES * RANKS_PER_NODE must be trainer.ranks of the recipe
#   NODE_ADDRESS     this node's address, where it is not the one on the way to node 0
#   MAX_RESTARTS     how often all ranks are started again from the last checkpoint when one dies (0)
#   JOIN_TIMEOUT_S   how long nodes wait for each other at the start (300)
#   LOG_DIR          directory for a log of each rank, and of Ray where the job fails; none without it. Also for node-N.pid,
#                    whose process takes signals, and at the end node-N.status and node-N.saved, the last checkpoint
#   OMP_NUM_THREADS, VLLM_CPU_OMP_THREADS_BIND
#                    threads of a process, and cores of vLLM's workers: where one is set, megarl binds no process to cores, as
#                    it does on CPUs otherwise
#   GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME, VLLM_HOST_IP
#                    the network interface, or address, of messages (those of NODE_ADDRESS)
#   RAY_AUTH_MODE, RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH
#                    Ray's token, alike on all nodes (~/.ray/auth_token, made by node 0 where there is none)
set -euo pipefail
tree=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$tree"
python=.venv/bin/python
[ -x "$python" ] || python=python3
exec "$python" -m megarl.cluster.node "$@"
