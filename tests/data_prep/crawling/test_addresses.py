"""Every block of IANA's special-purpose registries is refused, on any version of Python, and what is next to it is not."""

import ipaddress

import pytest

from data_prep.crawling.addresses import is_allowed, network

# iana.org/assignments/iana-ipv4-special-registry and iana-ipv6-special-registry, line by line (2025-10).
REGISTRY = {
    '0.0.0.0/8': 'This network',
    '0.0.0.0/32': 'This host on this network',
    '10.0.0.0/8': 'Private-Use',
    '100.64.0.0/10': 'Shared Address Space',
    '127.0.0.0/8': 'Loopback',
    '169.254.0.0/16': 'Link Local',
    '172.16.0.0/12': 'Private-Use',
    '192.0.0.0/24': 'IETF Protocol Assignments',
    '192.0.0.0/29': 'IPv4 Service Continuity Prefix',
    '192.0.0.8/32': 'IPv4 dummy address',
    '192.0.0.9/32': 'Port Control Protocol Anycast',
    '192.0.0.10/32': 'Traversal Using Relays around NAT Anycast',
    '192.0.0.170/32': 'NAT64/DNS64 Discovery',
    '192.0.0.171/32': 'NAT64/DNS64 Discovery',
    '192.0.2.0/24': 'Documentation (TEST-NET-1)',
    '192.31.196.0/24': 'AS112-v4',
    '192.52.193.0/24': 'AMT',
    '192.88.99.0/24': 'Deprecated (6to4 Relay Anycast)',
    '192.88.99.2/32': '6a44-relay anycast address',
    '192.168.0.0/16': 'Private-Use',
    '192.175.48.0/24': 'Direct Delegation AS112 Service',
    '198.18.0.0/15': 'Benchmarking',
    '198.51.100.0/24': 'Documentation (TEST-NET-2)',
    '203.0.113.0/24': 'Documentation (TEST-NET-3)',
    '240.0.0.0/4': 'Reserved',
    '255.255.255.255/32': 'Limited Broadcast',
    '::1/128': 'Loopback Address',
    '::/128': 'Unspecified Address',
    '64:ff9b:1::/48': 'IPv4-IPv6 Translation, local use',
    '100::/64': 'Discard-Only Address Block',
    '100:0:0:1::/64': 'Dummy IPv6 Prefix',
    '2001::/23': 'IETF Protocol Assignments',
    '2001::/32': 'TEREDO',
    '2001:1::1/128': 'Port Control Protocol Anycast',
    '2001:1::2/128': 'Traversal Using Relays around NAT Anycast',
    '2001:1::3/128': 'DNS-SD Service Registration Protocol Anycast',
    '2001:2::/48': 'Benchmarking',
    '2001:3::/32': 'AMT',
    '2001:4:112::/48': 'AS112-v6',
    '2001:10::/28': 'Deprecated (previously ORCHID)',
    '2001:20::/28': 'ORCHIDv2',
    '2001:30::/28': 'Drone Remote ID Protocol Entity Tags',
    '2001:db8::/32': 'Documentation',
    '2002::/16': '6to4',
    '2620:4f:8000::/48': 'Direct Delegation AS112 Service',
    '3fff::/20': 'Documentation',
    '5f00::/16': 'Segment Routing SIDs',
    'fc00::/7': 'Unique-Local',
    'fe80::/10': 'Link-Local Unicast',
    # not in these registries, and not of the public internet either
    '224.0.0.0/4': 'Multicast',
    'ff00::/8': 'Multicast',
    'fec0::/10': 'Site-Local, deprecated',
    '::/96': 'IPv4-compatible, deprecated',
    '4000::/2': 'not given out',
}


@pytest.mark.parametrize('block', REGISTRY)
def test_the_registries_are_refused(block):
    block = ipaddress.ip_network(block)
    middle = block.network_address + block.num_addresses // 2
    assert not any(is_allowed(str(address)) for address in (block.network_address, middle, block.broadcast_address))
    if block.version == 4:
        for address in (block.network_address, middle, block.broadcast_address):
            carriers = f'::ffff:{address}', f'64:ff9b::{address}', f'2002:{int(address) >> 16:x}:{int(address) & 0xFFFF:x}::1', f'::{address}'
            assert not any(map(is_allowed, carriers))


def test_what_lies_between_the_blocks_is_public():
    """Just outside of each IPv4 block, unless another block is there; and addresses that everybody asks."""
    blocks = [ipaddress.ip_network(block) for block in REGISTRY if '.' in block]
    neighbours = [ip for block in blocks for ip in (block.network_address - 1 if int(block.network_address) else None, _after(block)) if ip]
    public = [ip for ip in neighbours if not any(ip in block for block in blocks)]
    assert len(public) > 25
    for ip in public:
        assert is_allowed(str(ip))
        assert is_allowed(f'::ffff:{ip}')
        assert is_allowed(f'64:ff9b::{ip}')
    for address in ('93.184.216.34', '8.8.8.8', '1.1.1.1', '2606:4700::1111', '2001:4860:4860::8888', '2a00:1450::1', '2001:200::1', '3ffe::1'):
        assert is_allowed(address)


def _after(block):
    last = int(block.broadcast_address)
    return ipaddress.IPv4Address(last + 1) if last < 2**32 - 1 else None


@pytest.mark.parametrize('address', ['2001:0:808:808::1', '2002:808:808::1', '2001:0:a00:1::1', 'fe80::1%eth0', '64:ff9b::7f00:1', '64:ff9b::a00:1'])
def test_tunnels_and_scopes_are_refused_whatever_they_carry(address):
    assert not is_allowed(address)


@pytest.mark.parametrize(
    ('networks', 'address', 'allowed'),
    [
        *((['127.0.0.0/8'], address, True) for address in ('127.0.0.1', '127.1.2.3', '::ffff:127.0.0.1', '8.8.8.8')),
        *((['127.0.0.0/8'], address, False) for address in ('10.0.0.1', '169.254.169.254', '0.0.0.0', '::', '::1', '64:ff9b::7f00:1')),
        *((['10.1.0.0/16', 'fd12::/16'], address, True) for address in ('10.1.255.255', '::ffff:10.1.2.3', 'fd12::1', '93.184.216.34')),
        *((['10.1.0.0/16', 'fd12::/16'], address, False) for address in ('10.2.0.1', 'fd13::1', '192.168.0.1', '64:ff9b::a01:1', '::10.1.2.3')),
        (['10.0.0.7'], '10.0.0.7', True),
        (['10.0.0.7'], '10.0.0.8', False),
    ],
)
def test_named_networks_and_nothing_else(networks, address, allowed):
    assert is_allowed(address, [network(text) for text in networks]) == allowed


@pytest.mark.parametrize('text', ['10.0.0.1/8', '10.0.0.0/33', 'intranet', '10.0.0', ''])
def test_what_is_no_network_is_refused(text):
    with pytest.raises(ValueError, match=r'is not a network such as 10.0.0.0/8'):
        network(text)
