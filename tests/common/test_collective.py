"""What one rank does for all: its result, or its error, is everybody's."""

import json

import pytest
from composer.utils import dist, get_device

from diffusion.common.collective import on_first_rank, on_first_rank_of_node
from diffusion.contracts.errors import CODES
from diffusion.recipe import RecipeError
from tests.faults.children import ranks


class TwoArguments(Exception):
    """Pickle would make it again with one."""

    def __init__(self, what, why):
        super().__init__(f'{what}: {why}')


class Worded(Exception):
    """Pickle would make it again from its message, and word that once more."""

    def __init__(self, what):
        super().__init__(f'not {what}')


THAT_TRAVEL = [
    *(kind('the value, the limit, the remedy') for kind in CODES),
    RecipeError('a.yaml', ['lr: too high', 'load_path: s3://user:secret@b is none']),
    FileNotFoundError(2, 'No such file or directory', '/a'),
]
THAT_DO_NOT = [TwoArguments('disk', 'full'), ValueError(lambda: 0), Worded('whole')]
CASES = {'first': (on_first_rank, [0]), 'each node': (on_first_rank_of_node, [0, 2]), 'second node': (on_first_rank_of_node, [2])}


def failing(error):
    def work():
        raise error

    return work


def meet():
    """What this rank does, and gets from the others."""
    dist.initialize_dist(get_device('cpu'), timeout=60.0)
    rank, done = dist.get_global_rank(), []

    def work():
        done.append(rank)
        return {'by': rank}

    seen = {'done': done, 'first': on_first_rank(work), 'node': on_first_rank_of_node(work)}
    for case, (collective, failing_ranks) in CASES.items():
        errors = []
        for error in THAT_TRAVEL + THAT_DO_NOT:
            try:
                collective(failing(error) if rank in failing_ranks else dict)
            except Exception as caught:
                errors.append([type(caught).__name__, str(caught).partition(' at 0x')[0], getattr(caught, '__notes__', [])])
        seen[f'errors of {case}'] = errors
    return json.dumps({**seen, 'after': on_first_rank(lambda: 'goes on')})


@pytest.fixture(scope='module')
def seen(tmp_path_factory):
    """By two nodes of two ranks each."""
    return [json.loads(text) for text in ranks(meet, [[]] * 4, tmp_path_factory.mktemp('ranks'), nodes=2)]


def test_one_rank_works_and_all_have_the_result(seen):
    assert [rank['done'] for rank in seen] == [[0, 0], [], [2], []]
    assert [rank['first'] for rank in seen] == [{'by': 0}] * 4
    assert [rank['node'] for rank in seen] == [{'by': 0}] * 2 + [{'by': 2}] * 2


@pytest.mark.parametrize(('case', 'raiser'), [('first', 0), ('each node', 0), ('second node', 2)])
def test_the_error_of_one_is_that_of_all(seen, case, raiser):
    for rank, found in enumerate(seen):
        notes = [] if rank == raiser else [f'(raised on rank {raiser})']
        travelled = [[type(error).__name__, str(error), notes] for error in THAT_TRAVEL]
        assert found[f'errors of {case}'][: len(travelled)] == travelled
        two, function, worded = found[f'errors of {case}'][len(travelled) :]
        if rank == raiser:
            assert two == ['TwoArguments', 'disk: full', []]
            assert function[0] == 'ValueError'
            assert worded == ['Worded', 'not whole', []]
        else:
            assert (two[0], function[0]) == ('RuntimeError', 'RuntimeError')
            assert two[1].startswith('TwoArguments: disk: full (it cannot be pickled: ')
            assert function[1].startswith('ValueError: <function ')
            assert worded == ['RuntimeError', 'Worded: not whole', notes]
    assert [rank['after'] for rank in seen] == ['goes on'] * 4


def test_a_process_alone_has_its_own_error():
    error = TwoArguments('disk', 'full')
    for collective in (on_first_rank, on_first_rank_of_node):
        assert collective(lambda: 3) == 3
        with pytest.raises(TwoArguments) as caught:
            collective(failing(error))
        assert caught.value is error
