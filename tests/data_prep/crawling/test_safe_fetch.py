import datetime
import http.client
import ipaddress
import socket
import ssl
import time
import urllib.error
import urllib.request

import pytest

from data_prep.crawling.addresses import network
from data_prep.crawling.safe_fetch import Limits, RefusedError, install, opener
from tests.data_prep.crawling.picture_server import PictureServer, picture, running

LOOPBACK = Limits(1 << 20, (network('127.0.0.0/8'), network('::1')))


@pytest.fixture(scope='module')
def server():
    with running(PictureServer()) as server:
        yield server


def fetch(url, limits=LOOPBACK, timeout=5):
    with opener(limits).open(urllib.request.Request(url), timeout=timeout) as response:
        return response.read()


def answers(*addresses):
    """What getaddrinfo returns for a name with these addresses."""
    return [(socket.AF_INET6 if ':' in ip else socket.AF_INET, socket.SOCK_STREAM, 6, '', (ip, 80)) for ip in addresses]


def test_a_picture_arrives_unchanged(server):
    assert fetch(f'{server.url}/7.jpg') == picture(7)


@pytest.mark.parametrize('host', ['127.0.0.1', 'localhost', '2130706433', '0x7f.1', '[::1]', '[::ffff:127.0.0.1]', '0.0.0.0'])
def test_this_host_is_refused_however_it_is_written(server, host):
    before = server.asked.total()
    with pytest.raises(RefusedError, match='^private address$'):
        fetch(f'http://{host}:{server.server_port}/1.jpg', Limits())
    assert server.asked.total() == before


@pytest.mark.parametrize('url', ['file:///etc/passwd', 'ftp://127.0.0.1/x.jpg', 'data:image/png;base64,AA==', 'gopher://127.0.0.1/'])
def test_other_schemes_are_refused(url):
    with pytest.raises(RefusedError, match='^not http or https$'):
        fetch(url)


def test_redirects_are_checked_again(server):
    for where in ('http://10.0.0.1/x.jpg', 'http://169.254.169.254/latest/meta-data', '//192.168.0.1/'):
        with pytest.raises(RefusedError, match='^private address$'):
            fetch(f'{server.url}/to/{where}')
    with pytest.raises(urllib.error.HTTPError, match='Redirection to url'):
        fetch(f'{server.url}/to/file:///etc/passwd')
    with pytest.raises(RefusedError, match='^not http or https$'):
        fetch(f'{server.url}/to/ftp://127.0.0.1/x.jpg')


def test_three_redirects_are_followed_and_no_more(server):
    assert fetch(f'{server.url}/hops/3') == picture(1)
    with pytest.raises(urllib.error.HTTPError, match='too many redirects'):
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
    with pytest.raises(urllib.error.URLError):
        fetch('http://rebinding.example/x.jpg', Limits())
    assert (resolved, connected) == (['rebinding.example'], [('93.184.216.34', 80)])  # the address that was checked
    with pytest.raises(RefusedError, match='^private address$'):
        fetch('http://rebinding.example/x.jpg', Limits())
    assert len(connected) == 1


def test_one_private_address_among_public_ones_is_enough_to_refuse(monkeypatch):
    monkeypatch.setattr(socket, 'getaddrinfo', lambda *_, **__: answers('93.184.216.34', 'fd00::1'))
    monkeypatch.setattr(socket.socket, 'connect', lambda *_: pytest.fail('connected'))
    with pytest.raises(RefusedError, match='^private address$'):
        fetch('http://mixed.example/x.jpg', Limits())


def test_the_next_address_is_tried(server, monkeypatch):
    with socket.socket() as closed:
        closed.bind(('127.0.0.2', 0))  # nobody listens
        both = [(socket.AF_INET, socket.SOCK_STREAM, 6, '', address) for address in (closed.getsockname(), server.server_address)]
        monkeypatch.setattr(socket, 'getaddrinfo', lambda *_, **__: both)
        assert fetch('http://two.example/7.jpg') == picture(7)


def test_a_name_that_does_not_exist(monkeypatch):
    def unknown(*_, **__):
        raise socket.gaierror(-2, 'Name or service not known')

    monkeypatch.setattr(socket, 'getaddrinfo', unknown)
    with pytest.raises(RefusedError, match='^host not found$'):
        fetch('http://gone.example/x.jpg', Limits())


def test_proxies_of_the_environment_are_not_used(server, monkeypatch):
    with running(PictureServer()) as proxy:
        monkeypatch.setenv('http_proxy', proxy.url)
        monkeypatch.delenv('no_proxy', raising=False)
        assert fetch(f'{server.url}/7.jpg') == picture(7)
        assert not proxy.asked


def test_size_is_limited_whether_announced_or_not(server):
    assert len(fetch(f'{server.url}/megabytes/0')) == len(picture(1))
    for path in ('megabytes/1', 'endless'):
        with pytest.raises(RefusedError, match='^over 1 MB$'):
            fetch(f'{server.url}/{path}')


@pytest.mark.parametrize('path', ['slow', 'slow-headers', 'late-hops/3'])
def test_time_is_limited_however_often_something_comes(server, path):
    start = time.monotonic()
    with pytest.raises(RefusedError, match=r'^took over 0\.5 s$'):
        fetch(f'{server.url}/{path}', timeout=0.5)
    assert 0.5 <= time.monotonic() - start < 20
    assert fetch(f'{server.url}/late-hops/1') == picture(1)


def test_a_silent_server_is_given_up(server):
    start = time.monotonic()
    with pytest.raises(RefusedError, match=r'^took over 0\.5 s$'):
        fetch(f'{server.url}/hold/1.jpg', timeout=0.5)
    assert time.monotonic() - start < 20


def test_a_body_that_is_cut_short_is_an_error(server):
    with pytest.raises(http.client.IncompleteRead):
        fetch(f'{server.url}/cut')


def test_errors_of_servers_stay_errors(server):
    with pytest.raises(urllib.error.HTTPError, match='404'):
        fetch(f'{server.url}/nothing')


def test_install_guards_urlopen(server, monkeypatch):
    monkeypatch.setattr(urllib.request, '_opener', None)  # restored at the end
    install(Limits())
    with pytest.raises(RefusedError, match='^private address$'):
        urllib.request.urlopen(f'{server.url}/1.jpg', timeout=5)


def test_https_checks_the_certificate_of_the_name(tmp_path, monkeypatch):
    certificate, key = self_signed(tmp_path)
    with PictureServer() as server:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        server.socket = context.wrap_socket(server.socket, server_side=True)
        with running(server):
            url = f'https://127.0.0.1:{server.server_port}/7.jpg'
            with pytest.raises(urllib.error.URLError, match='CERTIFICATE_VERIFY_FAILED'):
                fetch(url)
            monkeypatch.setenv('SSL_CERT_FILE', str(certificate))
            assert fetch(url) == picture(7)
            with pytest.raises(urllib.error.URLError, match='CERTIFICATE_VERIFY_FAILED'):
                fetch(url.replace('127.0.0.1', 'localhost'))  # another name
            with pytest.raises(RefusedError, match='^private address$'):
                fetch(url, Limits())


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
