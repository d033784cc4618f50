# shellcheck shell=bash
# What the sbatch files of this folder share: each ends by sourcing this, with its settings set and RECIPE [key=value ...] as
# arguments.
#
# Runs launch/node.sh once on each node of the job, passes SIGUSR1 on to it, and ends the job by its exit status: with 75
# (megarl/exit_status.py: saved, start me again) the job goes back into the queue, any other status is the job's own.
set -uo pipefail
REQUEUE=75
# How long other nodes may go on after the first has ended, for what they still have to save or to say.
END_WAIT_S=900

if [ $# -eq 0 ]; then
    echo "megarl: no recipe; sbatch $SLURM_JOB_NAME.sbatch RECIPE [key=value ...]" >&2
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
rm -f "$LOG_DIR"/node-*.pid

of_srun=()   # what srun is told of the container
in_image=()  # what stands before the command that is to run in it
# shellcheck disable=SC2153  # a setting of the sbatch file
case $CONTAINER in
    "") ;;
    pyxis:?*)
        of_srun=(--container-image="${CONTAINER#pyxis:}" --container-workdir="$MEGARL_DIR"
            --container-mounts="$(printf '%s:%s,' "$MEGARL_DIR" "$MEGARL_DIR" "$LOG_DIR" "$LOG_DIR")${CONTAINER_MOUNTS}") ;;
    apptainer:?*)
        in_image=(apptainer exec --nv --pwd "$MEGARL_DIR" --bind "$MEGARL_DIR,$LOG_DIR${CONTAINER_MOUNTS:+,$CONTAINER_MOUNTS}"
            "${CONTAINER#apptainer:}") ;;
    *)
        echo "megarl: CONTAINER = $CONTAINER: must be pyxis:IMAGE, apptainer:IMAGE or empty" >&2
        exit 2 ;;
esac

# On each node: node.sh keeps the number of this shell, under which `warn` finds it.
# shellcheck disable=SC2016  # the variables are those of the node
on_node='export NODE_RANK=$SLURM_NODEID
echo $$ >"$LOG_DIR/node-$NODE_RANK.pid"
exec bash launch/node.sh "$@"'

# shellcheck disable=SC2016
to_node='for _ in {1..60}; do
    [ -s "$LOG_DIR/node-$SLURM_NODEID.pid" ] && exec kill -USR1 "$(cat "$LOG_DIR/node-$SLURM_NODEID.pid")"
    sleep 1
done
echo "megarl: node $SLURM_NODEID has not started, and cannot be told" >&2
exit 1'

# Tells node.sh on each node, and nobody else. A signal that Slurm sends to a step, or srun to its tasks, reaches every process
# in it: Ray's daemons, engines and reward workers would die of SIGUSR1 before the ranks have saved.
# shellcheck disable=SC2317,SC2329  # called by the trap
warn() {
    warned=yes
    echo "megarl: SIGUSR1 at $(date '+%F %T'): the run saves, and the job is queued again"
    srun --overlap --ntasks-per-node=1 bash -c "$to_node" && echo "megarl: every node has been told"
}
trap warn USR1
# scancel's: what happens is up to the steps, and this shell reports their status.
trap 'warned=yes' TERM

# Without the CPUs of the whole node a step is bound to one of them.
srun --ntasks-per-node=1 --cpus-per-task="$SLURM_CPUS_ON_NODE" --kill-on-bad-exit=0 --wait="$END_WAIT_S" \
    --output="$LOG_DIR/node-%n.log" --open-mode=append "${of_srun[@]}" "${in_image[@]}" \
    bash -c "$on_node" node "$@" &
nodes=$!
# A signal ends `wait` early; srun's own status comes from the next one.
warned=yes
while [ "$warned" ]; do
    warned=
    wait "$nodes"
    status=$?
done

echo "megarl: start ${SLURM_RESTART_COUNT:-0} of job $SLURM_JOB_ID ended with status $status; logs in $LOG_DIR"
# A job that is being cancelled, or that Slurm itself requeues, is not running any more.
if [ "$status" -eq "$REQUEUE" ] && [ "$(squeue --noheader --jobs "$SLURM_JOB_ID" --format %T)" = RUNNING ]; then
    trap - TERM USR1
    scontrol requeue "$SLURM_JOB_ID" && sleep 60 # Slurm ends this shell
    echo "megarl: the job was not queued again; sbatch it once more to continue" >&2
fi
exit "$status"
