# Sourced by the scripts of this folder: how they wait for their work, and whether Slurm shall run the job again.

: "${SLURM_JOB_ID:?is not set: give this file to sbatch}"
# A job has the environment of its sbatch; a container has its own.
[ -n "${SLURM_CONTAINER_IMAGE:-}" ] || command -v composer > /dev/null || {
    echo 'no composer on the PATH: activate the environment (. .venv/bin/activate) before sbatch' >&2
    exit 64
}

# heed COMMAND ...: run it and set $code. Both signals are handed on as SIGTERM: SIGUSR1, which says that the time is nearly over, and SIGTERM of
# scancel or of a preemption, after which this shell ends, because Slurm itself decides what follows.
heed() {
    local heard=yes cancelled='' child
    "$@" &
    child=$!
    trap 'heard=yes; kill -TERM "$child"' USR1
    trap 'heard=yes cancelled=yes; kill -TERM "$child"' TERM
    while [ -n "$heard" ]; do # a signal ends bash's `wait` before the child has ended
        heard=''
        wait "$child"
        code=$?
    done
    trap '' USR1 # too late to hand it on, and too early to die of it
    trap - TERM
    [ -z "$cancelled" ] || exit "$code"
}

# again JOB CODE LIMIT [FINAL ...]: end this shell with CODE, after a requeue of JOB if there is to be one.
#
#   LIMIT   starts in all, after which nothing is run again
#   FINAL   codes that nothing can change, besides 0, 64, 65 and 77 (docs/reliability.md)
#
# Again unless the code says not to: a list of codes to repeat would lose runs to codes that nobody has thought of, such as 247 of a rank that was
# killed, or 137 of a node that died.
again() {
    local job=$1 code=$2 limit=$3 final
    shift 3
    for final in 0 64 65 77 "$@"; do
        [ "$code" != "$final" ] || exit "$code"
    done
    case $code in
        75 | 129 | 130 | 143) ;; # an interruption, and no failure
        *) # counted in a file, because Slurm's count has interruptions, too. On one day a crash (70) is tried twice, all failures together four times
            local most=3 like='' failures=$SLURM_JOB_NAME-$job.failures today
            today=$(date +%F)
            [ "$code" != 70 ] || most=1 like='exit code 70$'
            echo "$today $(date +%T) $(hostname): exit code $code" >> "$failures"
            if [ "$(grep -c "^$today.*$like" "$failures")" -gt "$most" ]; then
                echo "exit code $code, too often for one day ($PWD/$failures): not run again" >&2
                exit "$code"
            fi
            ;;
    esac
    if [ "${SLURM_RESTART_COUNT:-0}" -ge "$limit" ]; then
        echo "started $((limit + 1)) times: not run again" >&2
        exit "$code"
    fi
    # Slurm ends this shell within the minute; if it ended by itself first, the job would count as finished.
    scontrol requeue "$job" && sleep 60
    exit "$code"
}
