"""Who has which micro-batch, and what becomes of it: with encoders that do as they are told, and a clock that goes when it is waited."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from ray import exceptions

from diffusion.common import ray_cluster
from diffusion.common.ray_cluster import ClusterError, ClusterRefusal
from diffusion.contracts.errors import STALLED, DataError, DataUnavailable, EncoderError, train_code
from diffusion.online import pool
from diffusion.online.encoder import BadImage
from diffusion.online.pool import EncodedAhead, Pool
from diffusion.online.start import refuse_lack
from diffusion.recipe.schema import RayEncoders

POISON = 255


class Call:
    def __init__(self, answer, done_at):
        self.answer, self.done_at = answer, done_at


class FakeRay:
    """Ray's functions over calls that are done at a time of their own."""

    exceptions = exceptions

    def __init__(self):
        self.now, self.killed = 0.0, []

    def put(self, content):
        return content

    def get(self, call):
        if isinstance(call.answer, exceptions.RayError):
            raise call.answer
        return call.answer

    def wait(self, calls, num_returns, timeout):
        done = [call for call in calls if call.done_at <= self.now]
        if not done and timeout:
            self.now = min(max(min(call.done_at for call in calls), self.now), self.now + timeout)
            done = [call for call in calls if call.done_at <= self.now]
        return done[:num_returns], [call for call in calls if call not in done]

    def kill(self, actor, no_restart):
        assert not no_restart
        self.killed.append(actor.name)
        actor.hangs = False


class FakeActor:
    """Encodes in a second, one call after the other; dies of POISON, and starts again in ten seconds."""

    def __init__(self, ray, name):
        self.ray, self.name, self.free_at, self.hangs, self.starts = ray, name, 0.0, False, ''
        self.ready, self.encode = SimpleNamespace(remote=self._ready), SimpleNamespace(remote=self._encode)
        self.busy_sec = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=self._busy))
        self.busy, self.takes_sec, self.num_calls = 0.0, 1.0, 0

    def _ready(self):
        return Call(self.starts or f'on {self.name}', self.free_at)

    def _busy(self):
        return Call(self.busy, float('inf') if self.hangs else self.ray.now)

    def _encode(self, images, training):
        begin, self.num_calls = max(self.ray.now, self.free_at), self.num_calls + 1
        if self.hangs:
            return Call(None, float('inf'))
        if (images == POISON).any():
            self.free_at = begin + 10
            return Call(exceptions.ActorUnavailableError('gone', None), begin + 0.1)
        self.free_at = begin + self.takes_sec
        return Call(images.astype(np.float32) * 2, self.free_at)


@pytest.fixture
def ray(monkeypatch):
    ray = FakeRay()

    def sleep(seconds):
        ray.now += seconds

    monkeypatch.setattr(pool, 'time', SimpleNamespace(monotonic=lambda: ray.now, sleep=sleep))
    return ray


def pool_of(ray, number, patience_sec=20):
    made = Pool(ray, {f'encoder-{i}': FakeActor(ray, f'encoder-{i}') for i in range(number)}, patience_sec)
    made.advance(1)
    return made


def batches(*values):
    for number, value in enumerate(values):
        key = torch.tensor([[5, 100 * number + i, 0] for i in range(4)])
        images = torch.full((4, 1, 1, 1), value, dtype=torch.uint8)
        images[:2] = number
        yield {'images': images, 'sample_key': key}


def through(made, *values, ahead_by=2, timeout_sec=120, refuse=None):
    return EncodedAhead(made, 2, ahead_by, True, timeout_sec, False, refuse)(batches(*values))


def test_order_content_and_micro_batches(ray):
    made = pool_of(ray, 3)
    given = list(through(made, 1, 2, 3, 4, 5))
    assert [batch['moments'][:, 0, 0, 0].tolist() for batch in given] == [[2 * n, 2 * n, 2 * n + 2, 2 * n + 2] for n in range(5)]
    assert all('images' not in batch for batch in given)
    assert made.num_images == 20


def test_no_more_batches_are_under_way_than_are_asked_for(ray):
    made, taken = pool_of(ray, 1), []

    def noted():
        for batch in batches(*range(10)):
            taken.append(len(taken))
            yield batch

    given = EncodedAhead(made, 2, 3, True, 120, False, None)(noted())
    next(given)
    assert len(taken) == 4
    given.close()
    assert not made.waiting
    assert all(work.dropped for member in made.members for work in member.sent.values())


def test_the_least_busy_encoder_gets_the_next_micro_batch(ray):
    made = pool_of(ray, 2)
    slow, fast = (member.actor for member in made.members)
    slow.takes_sec = 4
    list(through(made, *range(20), ahead_by=3))
    assert fast.num_calls > 1.5 * slow.num_calls  # in equal parts: 20 each


def test_poison_ends_in_time_and_is_named(ray, capsys):
    made = pool_of(ray, 2)
    given = through(made, 1, 2, POISON, 4, ahead_by=3)
    assert next(given)['moments'][2, 0, 0, 0] == 2  # batches before it are not taken along
    assert next(given)['moments'][2, 0, 0, 0] == 4
    with pytest.raises(
        DataUnavailable,
        match=r'1 of 2 micro-batches of a batch did not come back within 120 s .*lost over the samples with the ids 202, 203 of epoch 5',
    ):
        next(given)
    assert ray.now < 250
    assert 'encoder-0 is lost' in capsys.readouterr().err


def test_encoders_that_are_lost_again_and_again_are_not_replaced_for_ever(ray, capsys):
    made = pool_of(ray, 2)

    def lose(member):
        made._lose(member, exceptions.ActorUnavailableError('gone', None))
        while not (member.serves or member.lost):
            made.advance(1)

    for round_ in range(pool.MAX_LOSSES - 1):
        lose(made.members[0])
        ray.now += 2 * pool.LOSSES_SEC if round_ == 0 else 0
    lose(made.members[0])  # the first one is long ago
    assert made.num_serving == 2
    lose(made.members[0])
    assert made.members[0].lost.startswith('lost 10 times within ')
    assert 'encoder-0 is not used any more: lost 10 times' in capsys.readouterr().err
    assert len(list(through(made, 1, 2))) == 2  # the other one does the work
    for _ in range(pool.MAX_LOSSES - 1):
        lose(made.members[1])
    made._lose(made.members[1], exceptions.ActorUnavailableError('gone', None))
    with pytest.raises(DataUnavailable, match='no encoder is left. encoder-0: lost 10 times .*; run the same command again'):
        made.advance(1)


def test_a_cluster_without_a_head_ends_the_run(ray, monkeypatch):
    made = pool_of(ray, 1)
    monkeypatch.setattr(ray_cluster._state, 'head', SimpleNamespace(what='here', address='head:6379', silent_sec=31.0))
    with pytest.raises(ClusterError, match=r'here: the head of the Ray cluster, head:6379, has not answered for 31 s \(limit 30\)') as lost:
        list(through(made, 1))
    assert train_code(lost.value) == STALLED


def test_one_that_hangs_is_given_up_and_one_that_computes_is_not(ray, capsys):
    made = pool_of(ray, 2)
    made.members[1].actor.hangs = True
    list(through(made, 1, 2, 3))
    assert ray.killed == ['encoder-1']
    assert 20 < ray.now < 60
    assert 'has not answered for' in capsys.readouterr().err


def test_a_long_queue_is_no_hang(ray):
    """Of other ranks' work: the encoder says that it has computed for a second only."""
    made = pool_of(ray, 1, patience_sec=5)
    made.members[0].actor.free_at, made.members[0].actor.busy = 60, 1.0
    list(through(made, 1, 2))
    assert not ray.killed


def test_one_micro_batch_that_takes_longer_than_patience_is_a_hang(ray):
    made = pool_of(ray, 2, patience_sec=5)
    made.members[0].actor.free_at, made.members[0].actor.busy = 60, 7.0
    list(through(made, 1))
    assert ray.killed == ['encoder-0']


def test_a_replaced_encoder_that_differs_is_left_out(ray, capsys):
    made = pool_of(ray, 2)
    made.members[0].actor.starts = EncoderError('another VAE')
    list(through(made, 1, 2, 3))
    made._lose(made.members[0], exceptions.ActorUnavailableError('gone', None))
    list(through(made, *range(10)))
    assert made.members[0].lost == 'another VAE'
    assert made.num_serving == 1
    assert 'encoder-0 is not used any more: another VAE' in capsys.readouterr().err
    made._lose(made.members[1], exceptions.ActorDiedError(exceptions.RayTaskError('ready', 'line\nImportError: no module', ImportError())))
    with pytest.raises(DataUnavailable, match='no encoder is left. encoder-0: another VAE'):
        list(through(made, 1))


def test_an_encoder_that_differs_at_the_start_ends_the_run(ray):
    made = Pool(ray, {'encoder-0': FakeActor(ray, 'encoder-0')}, 5)
    ray.now = 1
    made.members[0].actor.starts = EncoderError('another VAE')
    made.members[0].starting.answer = made.members[0].actor.starts
    with pytest.raises(EncoderError, match='another VAE'):
        made.advance(1)


def test_a_sample_that_cannot_be_decoded_is_named_by_its_id(ray):
    made = pool_of(ray, 1)
    made.members[0].actor._encode = lambda images, training: Call(BadImage(1, 'ImageError: torn'), ray.now)
    made.members[0].actor.encode = SimpleNamespace(remote=made.members[0].actor._encode)

    def refuse(sample_id, cause):
        raise DataError(f'{sample_id}: {cause}')

    with pytest.raises(DataError, match='^1: ImageError: torn'):
        list(through(made, 1, refuse=refuse))


@pytest.mark.parametrize(
    ('machines', 'keys', 'room'),
    [
        ([{'CPU': 4}], {'actors': 4, 'gpus': 0}, None),
        ([{'CPU': 4}], {'actors': 5, 'gpus': 0}, 4),
        ([{'CPU': 64, 'GPU': 2}], {'actors': 4, 'gpus': 0.5}, None),
        ([{'CPU': 64, 'GPU': 2}], {'actors': 3, 'gpus': 0.6}, 2),  # 0.4 of each GPU is left over
        ([{'CPU': 3}, {'CPU': 3}], {'actors': 3, 'cpus': 2, 'gpus': 0}, 2),  # no encoder is on two machines
        ([{'CPU': 64, 'GPU': 8}, {'CPU': 8, 'GPU': 1, 'A10G': 1}], {'actors': 2, 'resource': 'A10G'}, 1),
        ([{'CPU': 64}], {'actors': 1}, 0),
        ([{'CPU': 64, 'GPU': 8}], {'actors': 1, 'resource': 'A10'}, 0),
    ],
)
def test_what_the_cluster_does_not_have_is_refused(machines, keys, room):
    wanted = RayEncoders(**keys)
    if room is None:
        refuse_lack(machines, wanted)
        return
    with pytest.raises(ClusterError if room else ClusterRefusal, match=f'room for {room}; ' + (f'set .*actors={room}' if room else 'change ')):
        refuse_lack(machines, wanted)
