import asyncio
import datetime
import gzip
import ipaddress
import socket
import ssl
import time
from dataclasses import replace

import aiohttp
import pytest
from multidict import CIMultiDict, CIMultiDictProxy

from data_prep.crawling.addresses import network
from data_prep.crawling.fetch import FetchError, Fetching, open_session, opts_out, reason_of
from data_prep.crawling.fetch import fetch as fetch_in_session
from tests.data_prep.crawling.image_server import ImageServer, image_bytes, running

PUBLIC = Fetching(max_bytes=1 << 20, timeout=5)
LOOPBACK = replace(PUBLIC, networks=(network('127.0.0.0/8'), network('::1')))


@pytest.fixture(scope='module')
def server():
    with running(ImageServer()) as server:
        yield server


def fetch(url, fetching=LOOPBACK, **changes):
    fetching = replace(fetching, **changes)

    async def one():
        async with open_session(fetching) as session:
            return await fetch_in_session(session, url, fetching)

    return asyncio.run(one())


def answers(*addresses):
    """What getaddrinfo returns for a name with these addresses."""
    families = {True: (socket.AF_INET6, (80, 0, 0)), False: (socket.AF_INET, (80,))}
    return [(family, socket.SOCK_STREAM, 6, '', (ip, *rest)) for ip in addresses for family, rest in [families[':' in ip]]]


def test_an_image_arrives_unchanged(server):
    assert fetch(f'{server.url}/7.jpg') == image_bytes(7)


@pytest.mark.parametrize('host', ['127.0.0.1', 'localhost', '2130706433', '0x7f.1', '[::1]', '[::ffff:127.0.0.1]', '0.0.0.0'])
def test_this_host_is_refused_however_it_is_written(server, host):
    before = server.asked.total()
    with pytest.raises(FetchError, match='^bad URL$' if host == '2130706433' else '^private address$'):
        fetch(f'http://{host}:{server.server_port}/1.jpg', PUBLIC)
    assert server.asked.total() == before


@pytest.mark.parametrize('url', ['file:///etc/passwd', 'ftp://127.0.0.1/x.jpg', 'data:image/png;base64,AA==', 'gopher://127.0.0.1/'])
def test_other_schemes_are_refused(url):
    with pytest.raises(FetchError, match='^not http or https$'):
        fetch(url)


def test_redirects_are_checked_again(server):
    for where in ('http://10.0.0.1/x.jpg', 'http://169.254.169.254/latest/meta-data', '//192.168.0.1/'):
        with pytest.raises(FetchError, match='^private address$'):
            fetch(f'{server.url}/to/{where}')
    for where in ('file:///etc/passwd', 'ftp://127.0.0.1/x.jpg'):
        with pytest.raises(FetchError, match='^not http or https$'):
            fetch(f'{server.url}/to/{where}')


def test_three_redirects_are_followed_and_no_more(server):
    assert fetch(f'{server.url}/hops/3') == image_bytes(1)
    with pytest.raises(FetchError, match='^too many redirects$'):
        fetch(f'{server.url}/hops/4')


def test_a_name_that_changes_its_address_gains_nothing(monkeypatch):
    resolved, connected = [], []

    def rebinding(host, *_, **__):
        resolved.append(host)
        return answers('93.184.216.34' if len(resolved) == 1 else '127.0.0.1')

    def connect(_, address):
        connected.append(address)
        raise ConnectionRefusedError

    monkeypatch.setattr(socket, 'getaddrinfo', rebinding)
    monkeypatch.setattr(socket.socket, 'connect', connect)
    with pytest.raises(FetchError, match='^connection failed$'):
        fetch('http://rebinding.example/x.jpg', PUBLIC)
    assert (resolved, connected) == (['rebinding.example'], [('93.184.216.34', 80)])  # the address that was checked
    with pytest.raises(FetchError, match='^private address$'):
        fetch('http://rebinding.example/x.jpg', PUBLIC)
    assert len(connected) == 1


def test_one_private_address_among_public_ones_is_enough_to_refuse(monkeypatch):
    monkeypatch.setattr(socket, 'getaddrinfo', lambda *_, **__: answers('93.184.216.34', 'fd00::1'))
    monkeypatch.setattr(socket.socket, 'connect', lambda *_: pytest.fail('connected'))
    with pytest.raises(FetchError, match='^private address$'):
        fetch('http://mixed.example/x.jpg', PUBLIC)


def test_the_next_address_is_tried(server, monkeypatch):
    with socket.socket() as closed:
        closed.bind(('127.0.0.2', 0))  # nobody listens
        both = [(socket.AF_INET, socket.SOCK_STREAM, 6, '', address) for address in (closed.getsockname(), server.server_address)]
        monkeypatch.setattr(socket, 'getaddrinfo', lambda *_, **__: both)
        assert fetch('http://two.example/7.jpg') == image_bytes(7)


def test_a_name_that_does_not_exist(monkeypatch):
    def unknown(*_, **__):
        raise socket.gaierror(-2, 'Name or service not known')

    monkeypatch.setattr(socket, 'getaddrinfo', unknown)
    with pytest.raises(FetchError, match='^host not found$'):
        fetch('http://gone.example/x.jpg', PUBLIC)


def test_proxies_of_the_environment_are_not_used(server, monkeypatch):
    with running(ImageServer()) as proxy:
        monkeypatch.setenv('http_proxy', proxy.url)
        monkeypatch.delenv('no_proxy', raising=False)
        assert fetch(f'{server.url}/7.jpg') == image_bytes(7)
        assert not proxy.asked


def test_size_is_limited_whether_announced_or_not(server):
    assert len(fetch(f'{server.url}/megabytes/0')) == len(image_bytes(1))
    for path in ('megabytes/1', 'endless'):
        with pytest.raises(FetchError, match='^over 1 MB$'):
            fetch(f'{server.url}/{path}')


@pytest.mark.parametrize('path', ['slow', 'slow-headers', 'late-hops/3'])
def test_time_is_limited_however_often_something_comes(server, path):
    start = time.monotonic()
    with pytest.raises(FetchError, match=r'^took over 0\.5 s$'):
        fetch(f'{server.url}/{path}', timeout=0.5)
    assert 0.5 <= time.monotonic() - start < 20
    assert fetch(f'{server.url}/late-hops/1') == image_bytes(1)


def test_a_silent_server_is_given_up(server):
    start = time.monotonic()
    with pytest.raises(FetchError, match=r'^took over 0\.5 s$'):
        fetch(f'{server.url}/hold/1.jpg', timeout=0.5)
    assert time.monotonic() - start < 20


def test_a_body_that_is_cut_short_is_an_error(server):
    with pytest.raises(FetchError, match='^cut short$'):
        fetch(f'{server.url}/cut')


def test_errors_of_servers_stay_errors(server):
    with pytest.raises(FetchError, match='^HTTP 404$'):
        fetch(f'{server.url}/nothing')


def test_compressed_bodies_stay_as_they_came(server):
    assert fetch(f'{server.url}/gzip') == gzip.compress(image_bytes(1), mtime=0)


@pytest.mark.parametrize(
    ('value', 'agent', 'out'),
    [
        ('noai', None, True),
        ('all, NoIndex', None, True),
        ('nofollow', None, False),
        ('mybot: noai', None, False),
        ('mybot: noai', 'MyBot', True),
        ('otherbot: noai', 'MyBot', False),
    ],
)
def test_opt_outs_are_for_all_or_for_the_agent_that_they_name(value, agent, out):
    assert opts_out(CIMultiDictProxy(CIMultiDict({'X-Robots-Tag': value})), agent) == out


@pytest.mark.parametrize(
    ('error', 'reason'),
    [
        (aiohttp.TooManyRedirects(None, ()), 'too many redirects'),
        (aiohttp.NonHttpUrlRedirectClientError('file:///x'), 'not http or https'),
        (aiohttp.InvalidURL('http://private address/'), 'bad URL'),
        (aiohttp.ClientResponseError(None, (), status=400, message='private address'), 'not a valid HTTP response'),  # whatever a server says
        (ssl.SSLCertVerificationError('private address'), 'TLS error'),
        (ConnectionRefusedError(111, 'Connection refused'), 'connection failed'),
        (aiohttp.ServerDisconnectedError(), 'connection failed'),
        (aiohttp.ClientPayloadError(), 'cut short'),
        (UnicodeError('label too long'), 'host not found'),
        (ValueError('port'), 'bad URL'),
        (RuntimeError('private address'), 'other'),
    ],
)
def test_reasons_are_few(error, reason):
    assert reason_of(error) == reason


@pytest.mark.parametrize(
    'url', [None, '', 'image.jpg', 'http://', 'http://a b/', 'http://h/\r\nX: y', 'http://h:port/', 'http://[::1', 'http://ü.example/']
)
def test_what_is_no_url_is_asked_of_nobody(url):
    with pytest.raises(FetchError, match='^bad URL$'):
        fetch(url)


def test_https_checks_the_certificate_of_the_name(tmp_path, monkeypatch):
    certificate, key = self_signed(tmp_path)
    with ImageServer() as server:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        server.socket = context.wrap_socket(server.socket, server_side=True)
        with running(server):
            url = f'https://127.0.0.1:{server.server_port}/7.jpg'
            with pytest.raises(FetchError, match='^TLS error$'):
                fetch(url)
            monkeypatch.setenv('SSL_CERT_FILE', str(certificate))
            assert fetch(url) == image_bytes(7)
            with pytest.raises(FetchError, match='^TLS error$'):
                fetch(url.replace('127.0.0.1', 'localhost'))  # another name
            with pytest.raises(FetchError, match='^private address$'):
                fetch(url, PUBLIC)


def self_signed(folder):
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, 'test')])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), now - datetime.timedelta(1), now + datetime.timedelta(1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address('127.0.0.1'))]), critical=False)
        .sign(key, hashes.SHA256())
    )
    (folder / 'certificate.pem').write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    private = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (folder / 'key.pem').write_bytes(private)
    return folder / 'certificate.pem', folder / 'key.pem'
