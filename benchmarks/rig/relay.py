"""Carries packets between the nodes of an emulated network, with delay, jitter and loss; a process of its own.

Linux emulates these with its netem queue, but many kernels are built without it. This relay needs a TUN device per node
and nothing else, so links behave alike everywhere. Packets are read from the device of the sender, wait in the delay
line of the receiver, and are written to its device. Segmentation offload stays on, so that a "packet" of a fast link
holds up to 64 KiB and is as cheap to carry as a frame; only where frames are to be lost does the kernel cut them first.

`benchmarks.rig.network` starts it with no more than the standard library, as `python relay.py DELAY JITTER LOSS RATE
NAMESPACE...`: seconds one way, seconds, a share, bits per second of each receiver's cable (0: no limit). It prints
"ready" once the devices exist, and ends, devices included, when its standard input is closed: also when its owner died.
"""

from __future__ import annotations

import ctypes
import fcntl
import gc
import math
import os
import random
import struct
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from select import select

#: The device's name in every namespace.
INTERFACE = "rig0"
#: What it says once packets are carried.
READY = "ready"
#: Seconds that a packet may wait for a cable before it is dropped, at the sender and at the receiver.
LONGEST_QUEUE = 0.05

# include/uapi/linux/if_tun.h
_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_IFF_TUN, _IFF_NO_PI, _IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
_TUN_F_CSUM, _TUN_F_TSO4 = 0x01, 0x02
_CLONE_NEWNET = 0x40000000

# Before each packet there is a virtio_net_hdr, which says how it is to be cut. Bytes 16 to 19 of IPv4 say where to.
_HEADER = 10
_VERSION, _LAST_OF_ADDRESS = _HEADER, _HEADER + 19
_LARGEST = _HEADER + (1 << 16)
_BATCH = 64

# Seconds one way that the kernel and this process take themselves: ping-pongs without delay take 46 us.
_OWN = 23e-6
# Packets leave late after a sleep, in virtual machines by tens of microseconds. How late is learned, up to this.
_LATEST = 200e-6
_GAIN = 0.05


def burst(rate: float) -> int:
    """Bytes that may pass at once where a cable was idle, at the sender and at the receiver.

    They hold at least one 64 KiB super-packet (segmentation offload), and with room to spare: 16 KB halve a 1 Gbit/s
    link. Fast links also need what passes in a millisecond.

    Args:
        rate: Bits per second.
    """
    return max(128 * 1024, int(rate / 8 / 1000))


class DelayLine:
    """Packets on their way to one node, in the order in which they were sent.

    Time is what the caller says it is. Jitter never changes the order: a packet that would overtake the one before
    arrives with it.

    Args:
        delay: Seconds that a packet is on its way.
        jitter: Seconds that it may be faster or slower, all values alike likely.
        loss: Share of the packets that never arrive.
        rate: Bits per second of the receiver's cable, a token bucket of `burst(rate)` bytes; 0 for no limit.
        seed: Seed of jitter and loss.
    """

    def __init__(self, delay: float, jitter: float = 0.0, loss: float = 0.0, rate: float = 0.0, seed: int = 0) -> None:
        self._delay, self._jitter, self._loss, self._rate = delay, jitter, loss, rate
        self._random = random.Random(seed)
        self._line: deque[tuple[float, bytes]] = deque()
        self._free = -math.inf

    @property
    def due(self) -> float:
        """When the next packet arrives, on the caller's clock; infinity when there is none."""
        return self._line[0][0] if self._line else math.inf

    def push(self, packet: bytes, now: float) -> None:
        """Send a packet.

        Args:
            packet: It, with its virtio_net_hdr.
            now: Seconds on the caller's clock.
        """
        if self._loss and self._random.random() < self._loss:
            return
        due = now
        if self._rate:
            full = now - burst(self._rate) * 8 / self._rate
            free = max(self._free, full) + (len(packet) - _HEADER) * 8 / self._rate
            if free - now > LONGEST_QUEUE:
                return
            self._free = free
            due = max(now, free)
        due += self._delay
        if self._jitter:
            due += self._random.uniform(-self._jitter, self._jitter)
        self._line.append((due, packet))

    def pop(self, now: float) -> Iterator[bytes]:
        """Take the packets that have arrived.

        Args:
            now: Seconds on the caller's clock.

        Yields:
            Packets, in the order in which they were sent.
        """
        while self._line and self._line[0][0] <= now:
            yield self._line.popleft()[1]


def relay(devices: Sequence[int], lines: Sequence[DelayLine], stop: int) -> None:
    """Carry packets until told to stop.

    Args:
        devices: File descriptors of the nodes' TUN devices, non-blocking.
        lines: The delay line towards each node.
        stop: File descriptor; the relay returns as soon as it is readable or closed.
    """
    late = 0.0
    while True:
        due = min(line.due for line in lines)
        wait = None if due == math.inf else max(0.0, due - late - time.monotonic())
        readable, _, _ = select([stop, *devices], [], [], wait)
        now = time.monotonic()
        if stop in readable:
            return
        for device in readable:
            for packet in _read(device):
                node = packet[_LAST_OF_ADDRESS] - 1
                if packet[_VERSION] >> 4 == 4 and 0 <= node < len(lines):
                    lines[node].push(packet, now)
        for device, line in zip(devices, lines, strict=True):
            for packet in line.pop(now + late):
                # While a device is not up yet, or not any more, packets to it are lost.
                with suppress(OSError):
                    os.write(device, packet)
        if wait and not readable:
            late = min(max(late + _GAIN * (time.monotonic() - due), 0.0), _LATEST)


def _read(device: int) -> Iterator[bytes]:
    with suppress(BlockingIOError):
        for _ in range(_BATCH):
            yield os.read(device, _LARGEST)


def open_device(namespace: str, segments: bool) -> int:
    """Make a TUN device in a network namespace; it exists until it is closed.

    Args:
        namespace: Name of the namespace, as `ip netns` knows it.
        segments: Whether packets come as TCP made them, up to 64 KiB, and not as frames.

    Returns:
        Its file descriptor, non-blocking.

    Raises:
        OSError: The kernel has no TUN devices, or this process may not make one.
    """
    home = os.open("/proc/self/ns/net", os.O_RDONLY)
    there = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    _enter(there)
    try:
        device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        flags = _IFF_TUN | _IFF_NO_PI | _IFF_VNET_HDR
        fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", INTERFACE.encode(), flags))
        fcntl.ioctl(device, _TUNSETOFFLOAD, _TUN_F_CSUM | _TUN_F_TSO4 if segments else 0)
    finally:
        _enter(home)
        os.close(home)
        os.close(there)
    return device


def _enter(namespace: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def main(delay: float, jitter: float, loss: float, rate: float, namespaces: Sequence[str]) -> int:
    """Make the devices and carry packets between them; the exit status."""
    try:
        devices = [open_device(namespace, segments=not loss) for namespace in namespaces]
    except OSError as error:
        print(error, flush=True)
        return 1
    # Ranks that use all cores must not make packets late. Where it is not allowed, they do.
    with suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    gc.disable()
    lines = [DelayLine(max(0.0, delay - _OWN), jitter, loss, rate, seed) for seed in range(len(devices))]
    print(READY, flush=True)
    relay(devices, lines, sys.stdin.fileno())
    return 0


if __name__ == "__main__":
    delay, jitter, loss, rate = map(float, sys.argv[1:5])
    sys.exit(main(delay, jitter, loss, rate, sys.argv[5:]))
