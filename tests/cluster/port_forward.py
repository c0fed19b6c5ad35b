"""Carry TCP connections between the machine's loopback and a node's private network.

A socket belongs for life to the network namespace it was made in. So this process makes its listener on one
side, moves itself to the other, and makes its outgoing connections there: no route, no link, no firewall
rule on the machine. Standard library only; ends by itself when the node's first process ends.

usage: port_forward.py LISTEN_IN LISTEN_ADDRESS LISTEN_PORT CONNECT_IN CONNECT_ADDRESS CONNECT_PORT NODE_PID
READY_FILE (…_IN is `host` or the pid whose network namespace is meant; port 0 lets the kernel choose)
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import socket
import sys
from pathlib import Path

CLONE_NEWNET = 0x40000000
BUFFER = 1 << 16


def enter_network(of: str, host: int) -> None:
    """Move this process into a network namespace: the machine's own, or that of a pid."""
    if of == "host":
        _setns(host)
        return
    with open(f"/proc/{of}/ns/net", "rb") as namespace:
        _setns(namespace.fileno())


def _setns(descriptor: int) -> None:
    if os.path.samestat(os.fstat(descriptor), os.stat("/proc/self/ns/net")):
        # Already there; to enter one's own namespace is allowed to root only.
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, CLONE_NEWNET) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"setns: {os.strerror(number)}")


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(BUFFER):
            writer.write(data)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()


async def _serve(listener: socket.socket, address: str, port: int, node_pid: int, ready: Path) -> None:
    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection(address, port)
        except OSError:
            # As a real network would say it: refused there is a reset here.
            writer.transport.abort()
            return
        await asyncio.gather(_pump(reader, far_writer), _pump(far_reader, writer))
        for end in (writer, far_writer):
            end.close()

    node_ended = asyncio.Event()
    asyncio.get_running_loop().add_reader(os.pidfd_open(node_pid), node_ended.set)
    await asyncio.start_server(carry, sock=listener)
    written = ready.with_suffix(".part")
    written.write_text(str(listener.getsockname()[1]))
    written.rename(ready)
    await node_ended.wait()
    # Not by way of asyncio's own end, which waits for open connections: their other side is gone.
    os._exit(0)


def main() -> None:
    listen_in, listen_address, listen_port, connect_in, address, port, node_pid, ready = sys.argv[1:]
    host = os.open("/proc/self/ns/net", os.O_RDONLY)
    enter_network(listen_in, host)
    listener = socket.create_server((listen_address, int(listen_port)))
    enter_network(connect_in, host)
    asyncio.run(_serve(listener, address, int(port), int(node_pid), Path(ready)))


if __name__ == "__main__":
    main()
