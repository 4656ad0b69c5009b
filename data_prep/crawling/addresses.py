"""Which IP addresses a crawl may ask: those of the public internet, by a list of our own.

`ipaddress.is_global` is no such list: it differs between versions of Python, and 3.11 takes 192.0.0.192, 192.88.99.1 and 3fff::1 for public.
"""

import ipaddress
from collections.abc import Iterable

Network = ipaddress.IPv4Network | ipaddress.IPv6Network

# IANA's special-purpose registries (RFC 6890; iana.org/assignments/iana-ipv4-special-registry and -ipv6-special-registry, 2025-10), whole: also
# the blocks marked as globally reachable, such as 192.0.0.9 and 192.31.196.0/24, are answered by the nearest router or name server that cares to.
SPECIAL_IPV4 = (
    *('0.0.0.0/8', '10.0.0.0/8', '100.64.0.0/10', '127.0.0.0/8', '169.254.0.0/16', '172.16.0.0/12', '192.0.0.0/24', '192.0.2.0/24'),
    *('192.31.196.0/24', '192.52.193.0/24', '192.88.99.0/24', '192.168.0.0/16', '192.175.48.0/24', '198.18.0.0/15', '198.51.100.0/24'),
    *('203.0.113.0/24', '240.0.0.0/4'),
    '224.0.0.0/4',  # multicast, which has a registry of its own
)
# Of IPv6 only 2000::/3 is given out. Inside it, Teredo (in 2001::/23) and 6to4 (2002::/16) tunnel to IPv4.
GIVEN_OUT_IPV6 = ipaddress.IPv6Network('2000::/3')
SPECIAL_IPV6 = ('2001::/23', '2001:db8::/32', '2002::/16', '2620:4f:8000::/48', '3fff::/20')
NAT64 = ipaddress.IPv6Network('64:ff9b::/96')  # the one prefix outside of 2000::/3 that leads to the public internet: it carries an IPv4 address
_SPECIAL = tuple(map(ipaddress.ip_network, (*SPECIAL_IPV4, *SPECIAL_IPV6)))


def is_allowed(address: str, networks: Iterable[Network] = ()) -> bool:
    """Whether an IP address is of the public internet, or of one of these networks. What carries an IPv4 address is judged by that."""
    ip = ipaddress.ip_address(address)
    if isinstance(ip, ipaddress.IPv6Address):
        ip = ip.ipv4_mapped or ip
    if any(ip in network for network in networks):
        return True
    if ip in NAT64:
        ip = ipaddress.IPv4Address(ip.packed[-4:])
    return not any(ip in network for network in _SPECIAL) and (ip.version == 4 or ip in GIVEN_OUT_IPV6)


def network(text: str) -> Network:
    """Read a network in CIDR notation, or one address. Raises ValueError: something else."""
    try:
        return ipaddress.ip_network(text)
    except ValueError as error:
        raise ValueError(f'{text!r} is not a network such as 10.0.0.0/8 or fd00::/8: {error}') from None
