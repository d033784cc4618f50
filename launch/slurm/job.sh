# shellcheck shell=bash
# What the sbatch files of this folder share: each ends by sourcing this, with its settings set and RECIPE [key=value ...] as
# arguments.
#
# Runs launch/node.sh once on each node of the job, passes SIGUSR1 on to it, and ends the job by its exit status: with 75
# (megarl/telemetry/exit_status.py: saved, start me again) the job goes back into the queue, any other status is the job's own.
set -uo pipefail
REQUEUE=75
MOST_STALLED=3  # starts in a row that ask for another one and have saved nothing more
# How long other nodes may go on after the first has ended, for what they still have to save or to say.
END_WAIT_S=900
# A warning before the nodes can hear of it waits for them.
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
# A requeued job keeps its number, and so its folder.
rm -f "$LOG_DIR"/node-*.{pid,status,saved}

of_srun=()   # what srun is told of the container
in_image=()  # what stands before the command that is to run in it
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

# On each node. node.sh leaves its process number in LOG_DIR once it takes signals; `warn` finds it by that.
# shellcheck disable=SC2016  # the variables are those of the node
on_node='export NODE_RANK=$SLURM_NODEID
exec bash launch/node.sh "$@"'

# shellcheck disable=SC2016
to_node='for _ in {1..100}; do
    [ -s "$LOG_DIR/node-$SLURM_NODEID.pid" ] && exec kill -USR1 "$(cat "$LOG_DIR/node-$SLURM_NODEID.pid")"
    sleep 1
done
echo "megarl: node $SLURM_NODEID has not started, and cannot be told" >&2
exit 1'

# Tells node.sh on each node, and nobody else. A signal that Slurm sends to a step, or srun to its tasks, reaches every process
# in it: Ray's and the engines' do not hear it, but those that are writing a checkpoint would die of it.
# shellcheck disable=SC2317,SC2329  # called by the trap
warn() {
    warned=yes
    echo "megarl: SIGUSR1 at $(date '+%F %T'): the run is to save, and the job to be queued again"
    timeout 120 srun --overlap --ntasks-per-node=1 bash -c "$to_node" && echo "megarl: every node has been told"
}
trap warn USR1
# scancel's: what happens is up to the steps, and this shell reports their status.
trap 'warned=yes' TERM

# Without the CPUs of the whole node a step is bound to one of them.
srun --ntasks-per-node=1 --cpus-per-task="$SLURM_CPUS_ON_NODE" --kill-on-bad-exit=0 --wait="$END_WAIT_S" \
    --output="$LOG_DIR/node-%n.log" --open-mode=append "${of_srun[@]}" "${in_image[@]}" \
    bash -c "$on_node" node "$@" &
nodes=$!
[ "$early" ] && warn
# A signal ends `wait` early; srun's own status comes from the next one.
warned=yes
while [ "$warned" ]; do
    warned=
    wait "$nodes"
    status=$?
done

# srun says the highest status of all nodes, and 75 is above those of failures; a node that was killed is above 75. So what
# the trainer's nodes say themselves counts, where they say it: any failure first, then any wish to be started again.
said=
for ((node = 0; node < TRAINER_NODES; node++)); do
    [ -s "$LOG_DIR/node-$node.status" ] && said+=" $(cat "$LOG_DIR/node-$node.status")"
done
for one in $REQUEUE 1 2; do
    [[ " $said " == *" $one "* ]] && status=$one
done

# A start that is always warned before it has saved anything would be queued again for ever.
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
# A job that is being cancelled, or that Slurm itself requeues, is not running any more.
if [ "$status" -eq "$REQUEUE" ] && [ "$(squeue --noheader --jobs "$SLURM_JOB_ID" --format %T)" = RUNNING ]; then
    trap - TERM USR1
    scontrol requeue "$SLURM_JOB_ID" && sleep 60 # Slurm ends this shell
    echo "megarl: the job was not queued again; sbatch it once more to continue" >&2
fi
exit "$status"
