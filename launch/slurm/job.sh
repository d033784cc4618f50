# shellcheck shell=bash
# The common part of the sbatch files in this folder. Each file ends by sourcing this file, with the settings set and
# RECIPE [key=value ...] as arguments.
#
# This script runs launch/node.sh once on each node of the job, passes SIGUSR1 on to it, and ends the job with its exit
# status. With status 75 (megarl/telemetry/exit_status.py: saved, ready for another start) the job goes back into the queue.
set -uo pipefail
REQUEUE=75
MOST_STALLED=3  # starts in a row that ask for another start without having saved anything new
# How long other nodes may run after the first node has ended, to save and to report.
END_WAIT_S=900
# Remember a warning that comes before the nodes can take it.
early=
trap 'early=yes' USR1

if [ $# -eq 0 ]; then
    echo "megarl: no recipe; sbatch launch/slurm/FILE.sbatch RECIPE [key=value ...]" >&2
    exit 2
fi
cd "$MEGARL_DIR" || exit 2
for module in $MODULES; do
    module load "$module" || exit 2
done

NUM_NODES=$SLURM_JOB_NUM_NODES
: "${MASTER_ADDRESS:=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)}"
LOG_DIR=$(realpath -m "$LOG_ROOT")/$SLURM_JOB_ID
export NUM_NODES RANKS_PER_NODE TRAINER_NODES MASTER_ADDRESS LOG_DIR
mkdir -p "$LOG_DIR"
# A requeued job keeps its number, and therefore its folder.
rm -f "$LOG_DIR"/node-*.{pid,status,saved}

of_srun=()   # srun's options for the container
in_image=()  # the words before the command that runs in the container
# shellcheck disable=SC2153  # a setting of the sbatch file
case $CONTAINER in
    "") ;;
    pyxis:?*)
        of_srun=(--container-image="${CONTAINER#pyxis:}" --container-workdir="$MEGARL_DIR"
            --container-mounts="$MEGARL_DIR:$MEGARL_DIR,$LOG_DIR:$LOG_DIR${CONTAINER_MOUNTS:+,$CONTAINER_MOUNTS}") ;;
    apptainer:?*)
        in_image=(apptainer exec --nv --pwd "$MEGARL_DIR" --bind "$MEGARL_DIR,$LOG_DIR${CONTAINER_MOUNTS:+,$CONTAINER_MOUNTS}"
            "${CONTAINER#apptainer:}") ;;
    *)
        echo "megarl: CONTAINER = $CONTAINER: must be pyxis:IMAGE, apptainer:IMAGE or empty" >&2
        exit 2 ;;
esac

# Runs on each node. node.sh writes its process number into LOG_DIR once it takes signals; `warn` finds node.sh by this
# number.
# shellcheck disable=SC2016  # the node expands the variables
on_node='export NODE_RANK=$SLURM_NODEID
exec bash launch/node.sh "$@"'

# shellcheck disable=SC2016
to_node='for _ in {1..100}; do
    [ -s "$LOG_DIR/node-$SLURM_NODEID.pid" ] && exec kill -USR1 "$(cat "$LOG_DIR/node-$SLURM_NODEID.pid")"
    sleep 1
done
echo "megarl: node $SLURM_NODEID has not started, so it cannot be warned" >&2
exit 1'

# Warns only node.sh on each node. A signal that Slurm sends to a step, or srun to its tasks, reaches every process of the
# step. Ray and the engines block it, but processes that write a checkpoint would die.
# shellcheck disable=SC2317,SC2329  # called by the trap
warn() {
    warned=yes
    echo "megarl: SIGUSR1 at $(date '+%F %T'): the run is to save, and the job to be queued again"
    timeout 120 srun --overlap --ntasks-per-node=1 bash -c "$to_node" && echo "megarl: every node has been warned"
}
trap warn USR1
# scancel sends TERM: the steps handle it, and this shell reports their status.
trap 'warned=yes' TERM

# Ask for all CPUs of the node; otherwise Slurm binds the step to one CPU.
srun --ntasks-per-node=1 --cpus-per-task="$SLURM_CPUS_ON_NODE" --kill-on-bad-exit=0 --wait="$END_WAIT_S" \
    --output="$LOG_DIR/node-%n.log" --open-mode=append "${of_srun[@]}" "${in_image[@]}" \
    bash -c "$on_node" node "$@" &
nodes=$!
[ "$early" ] && warn
# A signal ends `wait` early; the next `wait` returns srun's status.
warned=yes
while [ "$warned" ]; do
    warned=
    wait "$nodes"
    status=$?
done

# srun returns the highest status of all nodes. 75 is higher than the status of a failure, and a killed node's status is
# higher than 75. So the statuses that the trainer's nodes have written count: first a failure, then a request for another
# start.
statuses=
for ((node = 0; node < TRAINER_NODES; node++)); do
    [ -s "$LOG_DIR/node-$node.status" ] && statuses+=" $(cat "$LOG_DIR/node-$node.status")"
done
for candidate in $REQUEUE 1 2; do
    [[ " $statuses " == *" $candidate "* ]] && status=$candidate
done

# A job whose starts are all warned before they save anything would be queued again forever.
saved=$(cat "$LOG_DIR/node-0.saved" 2>/dev/null || echo unknown)
before='' stalled=0
[ -s "$LOG_DIR/stalled" ] && read -r before stalled <"$LOG_DIR/stalled"
[ "$saved" = "$before" ] || stalled=0
if [ "$status" -eq "$REQUEUE" ] && [ $((++stalled)) -ge "$MOST_STALLED" ]; then
    echo "megarl: $stalled starts in a row have saved nothing beyond \"$saved\": the job is not queued again; give it more time" \
        "(--time), or save more often (run.checkpoint_every)" >&2
    status=1
fi
echo "$saved $stalled" >"$LOG_DIR/stalled"

echo "megarl: start ${SLURM_RESTART_COUNT:-0} of job $SLURM_JOB_ID ended with status $status; logs in $LOG_DIR"
# A job that is being cancelled, or that Slurm requeues itself, is no longer in the state RUNNING.
if [ "$status" -eq "$REQUEUE" ] && [ "$(squeue --noheader --jobs "$SLURM_JOB_ID" --format %T)" = RUNNING ]; then
    trap - TERM USR1
    scontrol requeue "$SLURM_JOB_ID" && sleep 60 # Slurm ends this shell
    echo "megarl: the job was not queued again; sbatch it once more to continue" >&2
fi
exit "$status"
