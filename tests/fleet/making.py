"""Rows for tests of the policies: what a test does not say is harmless."""

from fleet.jobs.spec import JobLimits, MachineNeeds
from fleet.policies.rows import AttemptRow, Ban, JobRow, JobState, NodeRow, NodeState, OwnerRow

DAY = 86400.0


def job(id='j', owner='o', number=0, state=JobState.QUEUED, limits=None, needs=None, **fields):
    return JobRow(id, owner, number, JobState(state), JobLimits(**(limits or {})), MachineNeeds(**(needs or {})), **fields)


def attempt(epoch=1, node='n', ending=None, job='j', started=0.0, sec=60.0, steps=(0, 0), price=0.324, owner='o', **fields):
    ended = None if ending is None else started + sec
    return AttemptRow(
        job,
        epoch,
        node,
        fields.pop('gpu', 'rtx4090'),
        fields.pop('recipe', 'r'),
        started,
        started + sec,
        *steps,
        price,
        ended,
        ending,
        owner=owner,
        **fields,
    )


def node(name='n', state=NodeState.LIVE, gpu_gb=24.0, **fields):
    return NodeRow(name, NodeState(state), 'rtx4090', gpu_gb, **fields)


def owner(name='o', max_leased=10, num_leased=0, dollars_left=10.0, last_leased=0.0):
    return OwnerRow(name, max_leased, num_leased, dollars_left, last_leased)


def ban(job='j', node='n', since=0.0, until=DAY):
    return Ban(job, node, since, until, 'crashed')
