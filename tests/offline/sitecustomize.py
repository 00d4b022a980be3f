"""On ``PYTHONPATH``, this cuts a Python process and its children off from every network but the
computer's own.

Kernels talk to their notebook over the loopback address, which stays open; everything else raises
``OSError``.
"""

import ipaddress
import os
import socket

# For clients that are not written in Python: a proxy that nobody answers for.
for name in ("http_proxy", "https_proxy", "all_proxy"):
    os.environ[name] = os.environ[name.upper()] = "http://127.0.0.1:9"


def _is_local(host) -> bool:
    if host in (None, "", "localhost", b"localhost"):
        return True
    try:
        return ipaddress.ip_address(host.decode() if isinstance(host, bytes) else host).is_loopback
    except ValueError:
        return False


def _refuse_unless_local(host) -> None:
    if not _is_local(host):
        raise OSError(f"this test runs without a network, and something asked for {host!r}")


def _guard_method(name: str) -> None:
    original = getattr(socket.socket, name)

    def guarded(self, *arguments):
        if self.family in (socket.AF_INET, socket.AF_INET6):
            _refuse_unless_local(arguments[-1][0])
        return original(self, *arguments)

    setattr(socket.socket, name, guarded)


def _guard_lookup(name: str) -> None:
    original = getattr(socket, name)

    def guarded(host, *arguments, **options):
        _refuse_unless_local(host)
        return original(host, *arguments, **options)

    setattr(socket, name, guarded)


for name in ("connect", "connect_ex", "sendto"):
    _guard_method(name)
for name in ("getaddrinfo", "gethostbyname"):
    _guard_lookup(name)
