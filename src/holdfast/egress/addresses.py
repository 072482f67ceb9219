"""Which addresses a name may lead to: those of the public internet. And lookups, which are the host's.

A name says nothing about where it leads: whoever owns it can let it point to this machine, to its neighbours, or to the
address from which a cloud hands out credentials. What is listed as an address by the user is not asked here.
"""

import asyncio
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from ipaddress import IPv4Address, IPv4Network, IPv6Network, ip_address

import anyio

from holdfast.egress.names import Address

MOST_LOOKUPS = 8
"""At once, of one session. A lookup cannot be stopped; a guest with a wildcard could pile up as many as it likes."""

# Not `ipaddress.is_global`: what it says has changed between patch releases of Python.
_NOT_PUBLIC_4 = [
    IPv4Network(network)
    for network in (
        "0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12", "192.0.0.0/24",
        "192.0.2.0/24", "192.88.99.0/24", "192.168.0.0/16", "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24",
        "224.0.0.0/4", "240.0.0.0/4",
        "168.63.129.16/32",  # public, and yet Azure's agent on every machine there
    )
]  # fmt: skip
_PUBLIC_6 = IPv6Network("2000::/3")
_NOT_PUBLIC_6 = [
    IPv6Network(network)
    for network in (
        "2001::/23",  # among others Teredo and ORCHID: they carry other addresses
        "2001:db8::/32", "3fff::/20",  # documentation
        "2002::/16",  # 6to4 carries IPv4
    )
]  # fmt: skip
_NAT64 = IPv6Network("64:ff9b::/96")


def is_public(address: Address) -> bool:
    """
    >>> is_public(ip_address("93.184.215.14")), is_public(ip_address("169.254.169.254"))
    (True, False)
    >>> is_public(ip_address("64:ff9b::8.8.8.8")), is_public(ip_address("64:ff9b::127.0.0.1"))
    (True, False)
    """
    if isinstance(address, IPv4Address):
        return not any(address in network for network in _NOT_PUBLIC_4)
    if address.scope_id is not None:
        return False
    if address in _NAT64:
        return is_public(IPv4Address(int(address) & 0xFFFFFFFF))
    return address in _PUBLIC_6 and not any(address in network for network in _NOT_PUBLIC_6)


class Lookups:
    """Names to addresses, by the host's own resolver. `OSError` where there are none."""

    def __init__(self) -> None:
        self._slots = anyio.Semaphore(MOST_LOOKUPS)

    async def __call__(self, name: str) -> Sequence[Address]:
        await self._slots.acquire()
        # A thread of its own: those of the loop's pool are needed for disks, and a lookup may hang for half a minute.
        loop, done = asyncio.get_running_loop(), anyio.Event()
        found: list[Address] = []

        def finish() -> None:
            self._slots.release()  # not before the thread is through, even if nobody waits for it any more
            done.set()

        def look_up() -> None:
            with suppress(OSError, ValueError):
                found.extend(_look_up(name))
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(finish)

        try:
            threading.Thread(target=look_up, name="holdfast-lookup", daemon=True).start()
        except RuntimeError:
            self._slots.release()
            raise OSError("no thread for a lookup") from None
        await done.wait()
        if not found:
            raise OSError("no address")
        return found


def _look_up(name: str) -> list[Address]:
    # The dot at its end: no search list and no file of the host's turns it into another name than the listed one.
    answers = socket.getaddrinfo(f"{name}.", None, type=socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG)
    return list(dict.fromkeys(ip_address(address[0]) for *_, address in answers))
