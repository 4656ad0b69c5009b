"""How commands end, as a number that a launcher or scheduler can act on.

train.py runs for weeks where nobody looks, so its codes tell apart who has to do something; they are those of sysexits.h where it has a word
for it. docs/reliability.md says for each what to do; tests/faults/ provokes each.
"""

from __future__ import annotations

BAD_INPUT = 2  # of all other commands: the message says what to change

FINISHED = 0  # also if the run already was
BAD_RECIPE = 64  # wrong, or it does not fit this machine or the run that it would go on with: do not retry
BAD_DATA = 65  # a data set, encoders or checkpoints are wrong, missing or damaged: do not retry
CRASH = 70  # a mistake of ours, or of a library: the traceback says where
SUPERSEDED = 73  # another process has taken the checkpoint folder and continues the run: do not retry
PREEMPTED = 75  # SIGTERM, SIGUSR1, SIGHUP or Ctrl-C came and everything is saved, or another process still holds the run: run the same command again
STALLED = 76  # nothing moved for too long, disk or storage failed for too long, or a rank is gone: run again, elsewhere if it repeats
NON_FINITE = 77  # loss or gradients stayed NaN or infinite: look at the run before resuming it
INTERRUPTED = 130  # a second Ctrl-C: ended at once, nothing saved since the last checkpoint; 128 + SIGINT, as shells have it
