# Sourced by the scripts of this folder: whether Slurm shall run a job again.
#
# Again unless the code says not to (docs/reliability.md): a list of codes to repeat would lose runs to codes that nobody has thought of, such as
# 247 of a rank that was killed, or 137 of a node that died.

# again JOB CODE LIMIT: ends this shell with CODE, after a requeue of JOB if there is to be one. Codes besides 0 that nothing can change follow LIMIT.
#
#   LIMIT   starts after which interruptions (75, 129, 143: saved, and no failure) end it all the same
again() {
    local job=$1 code=$2 limit=$3 final
    shift 3
    for final in 0 64 65 77 "$@"; do
        [ "$code" != "$final" ] || exit "$code"
    done
    case $code in
        75 | 129 | 143)
            [ "${SLURM_RESTART_COUNT:-0}" -lt "$limit" ] || exit "$code"
            ;;
        *) # failures are counted in a file, because Slurm's count has its own requeues, too. A crash (70) is tried twice, all else four times
            local most=3 failures=$SLURM_JOB_NAME-$job.failures
            [ "$code" != 70 ] || most=1
            echo "$(date) $(hostname): exit code $code" >> "$failures"
            [ "$(wc -l < "$failures")" -le "$most" ] || exit "$code"
            ;;
    esac
    # Slurm ends this shell within the minute; if it ended by itself first, the job would count as finished.
    scontrol requeue "$job" && sleep 60
    exit "$code"
}
