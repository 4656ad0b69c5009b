"""Exit codes: numbers that a launcher or scheduler can act on. `endings.py` says which error has which.

train.py runs unattended for weeks, so its codes say who has to act; they are those of sysexits.h where that has a fitting one.
docs/reliability.md says for each what to do; tests/faults/ provokes each.
"""

FINISHED = 0  # also if the run already was

# Of all commands but train.py.
BAD_INPUT = 2  # the message says what to change
INCOMPLETE = 3  # stopped by something outside (storage, network, a killed worker): run the same command again

# Of train.py.
BAD_RECIPE = 64  # wrong, or does not fit this machine or the run that it would resume: do not retry
BAD_DATA = 65  # a dataset, encoders or checkpoints are wrong, missing or damaged: do not retry
CRASH = 70  # a bug of this project or of a library: the traceback says where
SUPERSEDED = 73  # another process has taken the checkpoint folder and continues the run: do not retry
PREEMPTED = 75  # SIGTERM, SIGUSR1, SIGHUP or Ctrl-C came and everything is saved, or another process still holds the run: run the same command again
STALLED = 76  # nothing moved for too long, disk or storage failed for too long, or a rank is gone: run again, on another machine if it repeats
NON_FINITE = 77  # loss or gradients stayed NaN or infinite: look at the run before resuming it

INTERRUPTED = 130  # Ctrl-C (of train.py the second one): ended at once; 128 + SIGINT, as shells have it
