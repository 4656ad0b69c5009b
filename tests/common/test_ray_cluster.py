"""Addresses of Ray clusters, what answers at them, and what fits on their machines: without a cluster."""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest

from diffusion.common import ray_cluster
from diffusion.common.ray_cluster import ClusterError, ClusterRefusal, connect, refuse_lost_head, room_for, wrong_address

pytest.importorskip('ray', reason='Ray is an extra')

FEW = 'RAY_gcs_server_port_wait_time_s'  # Ray's name
SETTINGS_OF_GRPC = bytes.fromhex('000024040000000000') + bytes(36)


@contextmanager
def listening(answer: Callable[[socket.socket], object] | None) -> Iterator[str]:
    """Address of something that lets anyone connect, and then does as it is told; None: nothing, as the kernel does for a stopped process."""
    with socket.create_server(('127.0.0.1', 0)) as server:

        def serve() -> None:
            with suppress(OSError):  # the server was closed
                while True:
                    connection, _ = server.accept()
                    with connection:
                        answer(connection)

        if answer is not None:
            threading.Thread(target=serve, daemon=True).start()
        yield f'127.0.0.1:{server.getsockname()[1]}'


@pytest.fixture
def joined(monkeypatch) -> Iterator[list[str]]:
    """What Ray was asked to connect to, with the seconds that it may take; it does not do it."""
    import ray

    asked: list[str] = []
    monkeypatch.delenv('RAY_ADDRESS', raising=False)
    monkeypatch.setattr(ray_cluster, 'ANSWER_SEC', 1)
    monkeypatch.setattr(ray, 'is_initialized', lambda: False)
    monkeypatch.setattr(ray, 'init', lambda address, **_: asked.append(f'{address} {os.environ.get(FEW)}'))
    yield asked
    ray_cluster.disconnect()


@pytest.mark.parametrize('address', ['auto', 'local', 'head:6379', '10.0.0.5:6379', 'a-b.example.com:65535', '[fd00::1]:6379'])
def test_addresses_that_ray_takes(address):
    assert wrong_address(address) == ''


@pytest.mark.parametrize(
    ('address', 'said'),
    [
        ('head', "'head' is no address of a cluster; write host:port of its head, such as 10.0.0.5:6379, auto, or local"),
        ('fd00::1:6379', 'is no address'),
        (':6379', 'is no address'),
        ('head:', 'is no address'),
        ('head:6379 ', 'is no address'),
        ('head:port', 'is no address'),
        ('head:80', 'the port 80 is not one of 1024 to 65535; that of `ray start --head` is 6379'),
        ('head:70000', 'the port 70000'),
        ('ray://head:10001', 'is an address of Ray Client; run this on a machine of the cluster'),
        ('http://head:8265', 'is an address of Ray Client'),
    ],
)
def test_other_addresses_are_refused_before_ray_starts(address, said, joined, monkeypatch):
    with pytest.raises(ClusterRefusal, match='^here: ') as raised:
        connect(address, 'here')
    assert said in str(raised.value)
    monkeypatch.setenv('RAY_ADDRESS', address)
    for given in None, 'auto':
        with pytest.raises(ClusterRefusal, match='^here: RAY_ADDRESS: '):
            connect(given, 'here')
    connect('local', 'here')  # where it means nothing
    assert joined == ['local None']


def test_where_nothing_answers_that_is_said_at_once(joined):
    """Ray would ask for 14 minutes."""
    with socket.create_server(('127.0.0.1', 0)) as server:
        closed = f'127.0.0.1:{server.getsockname()[1]}'
    web = b'HTTP/1.1 400 Bad Request\r\n\r\n'
    answers = [
        (None, 'no answer within 1 s'),
        (lambda connection: connection.recv(100), 'something else than Ray listens there'),
        (lambda connection: connection.recv(100) and connection.sendall(web), 'something else than Ray listens there'),
    ]
    begun = time.monotonic()
    with pytest.raises(
        ClusterError, match=rf'here: no Ray cluster at {closed}: Connection refused; start it with `ray start`, or correct the address'
    ):
        connect(closed, 'here')
    for answer, said in answers:
        with listening(answer) as address, pytest.raises(ClusterError, match=f'{address}: {said}'):
            connect(address, 'here')
    assert time.monotonic() - begun < 10
    assert joined == []


def test_auto_is_probed_too(joined, monkeypatch):
    """What the last `ray start` of this machine has left may be gone. Ray writes the machine's own address for 127.0.0.1."""
    with socket.create_server(('127.0.0.1', 0)) as server:
        port = server.getsockname()[1]
    monkeypatch.setenv('RAY_ADDRESS', f'127.0.0.1:{port}')
    with pytest.raises(ClusterError, match=rf'no Ray cluster at \S+:{port} \(auto\): Connection refused'):
        connect('auto', 'here')
    assert joined == []


def test_what_answers_as_grpc_does_is_left_to_ray(joined, monkeypatch):
    for byte_by_byte in False, True:

        def answer(connection, byte_by_byte=byte_by_byte):
            assert connection.recv(100).startswith(b'PRI * HTTP/2.0')
            for part in [bytes([byte]) for byte in SETTINGS_OF_GRPC] if byte_by_byte else [SETTINGS_OF_GRPC]:
                connection.sendall(part)

        with listening(answer) as address:
            connect(address, 'here')
        assert joined.pop() == f'{address} 1'
    assert FEW not in os.environ
    monkeypatch.setenv(FEW, '90')  # the user's own
    with listening(answer) as address:
        connect(address, 'here')
    assert joined == [f'{address} 90']


def test_a_head_that_is_gone_is_noticed_before_ray_ends_the_process(joined, monkeypatch):
    def answer(connection):
        connection.recv(100)
        connection.sendall(SETTINGS_OF_GRPC)

    monkeypatch.setattr(ray_cluster, 'LOOK_SEC', 0.05)
    monkeypatch.setattr(ray_cluster, 'ANSWER_SEC', 0.2)
    monkeypatch.setenv('RAY_gcs_rpc_server_reconnect_timeout_s', '2')
    with listening(answer) as address:
        connect(address, 'here')
        time.sleep(1.5)
        refuse_lost_head()
    end = time.monotonic() + 60
    while ray_cluster._state.head.silent_sec <= 1 and time.monotonic() < end:
        time.sleep(0.05)
    with pytest.raises(ClusterError, match=rf'here: the head of the Ray cluster, {address}, has not answered for \d s \(limit 1\).*resume with: '):
        refuse_lost_head()
    ray_cluster.disconnect()
    refuse_lost_head()


def test_a_share_of_a_gpu_is_of_one_gpu():
    assert room_for([{'CPU': 64, 'GPU': 2}], {'CPU': 1, 'GPU': 0.6}) == 2
    assert room_for([{'CPU': 3, 'GPU': 2}], {'CPU': 1, 'GPU': 0.1}) == 3
    assert room_for([{'CPU': 64, 'GPU': 1}, {'CPU': 64, 'GPU': 3}], {'CPU': 1, 'GPU': 2}) == 1
    assert room_for([{'CPU': 2}], {'CPU': 1, 'GPU': 0, 'A10G': 1}) == 0
