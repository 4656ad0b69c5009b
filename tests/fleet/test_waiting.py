"""Why a job waits: each reason, and none for a job that does not; and that a job of which the rule says nothing else is handed out."""

import pytest

from fleet.policies.hand_out import why_waiting
from tests.fleet.making import ban, job, node, owner
from tests.fleet.reference import choose

NEEDY = {'gpu_gb': 80.0, 'image': 'sha256:a', 'trusted': True}
A_NODE = [node()]
CASES = [
    (job(state='done'), owner(), A_NODE, [], 3, None),
    (job(), owner(dollars_left=-0.05), A_NODE, [], 3, 'the budget of o is spent (0.0500 dollars beyond it)'),
    (job(), owner(dollars_left=0), A_NODE, [], 3, 'the budget of o is spent;'),
    (job(), owner(num_leased=10), A_NODE, [], 3, '10 jobs of o on machines, at most 10'),
    (job(), owner(), [], [], 3, 'no machine is here'),
    (job(), owner(), [node(state='draining')], [], 3, 'no machine is here'),
    (job(needs={'gpu_gb': 80.0}), owner(), A_NODE, [], 3, 'needs.gpu_gb is 80, the largest GPU here has 24'),
    (job(needs={'image': 'sha256:a'}), owner(), A_NODE, [], 3, 'no machine here has the image sha256:a'),
    (job(needs={'trusted': True}), owner(), A_NODE, [], 3, 'no machine here is trusted'),
    (job(needs=NEEDY), owner(), [node(gpu_gb=80.0), node(image='sha256:a', trusted=True)], [], 3, 'all that it needs together'),
    (job(), owner(), A_NODE, [ban()], 3, 'each machine that it fits has failed it (1 machine)'),
    (job(), owner(), [*A_NODE, node('small', gpu_gb=1.0)], [ban(until=9.0), ban('other')], 3, '3 jobs of o before it'),
    (job(not_before=70.0), owner(), A_NODE, [], 3, 'handed out again in 60 s'),
    (job(), owner(), A_NODE, [], 0, 'it is the next one of o'),
]


@pytest.mark.parametrize(('waits', 'of', 'nodes', 'bans', 'num_before', 'said'), CASES)
def test_each_reason(waits, of, nodes, bans, num_before, said):
    text = why_waiting(waits, of, nodes, bans, num_before, now=10.0)
    assert (text == '') if said is None else (said in text)
    is_handed_out = any(choose(one, [waits], bans, {'o': of}, 10.0) for one in nodes)
    assert is_handed_out == ('before it' in text or 'next one' in text)  # the claim's own rule agrees
