"""Memory of the devices: host memory that is poisoned when it is allocated and when it is freed."""

from bisect import bisect_right, insort
from collections import deque
from operator import attrgetter

import numpy as np

from software_cuda.recorder import Fault

_BY_ADDRESS = attrgetter("address")
#: NaN in every floating-point format.
POISON = 0xFF

ALIGNMENT = 256
#: Unallocated bytes on either side, so that an access beyond an end is noticed.
_MARGIN = 512
#: Freed memory that is not returned to the host's allocator, so that a late use of it is noticed.
_QUARANTINE_BYTES, _QUARANTINE_BLOCKS = 64 << 20, 2000


class Allocation:
    """One block.

    ``owner`` is the pool or the capture that it comes from, None for memory of ``cudaMalloc``. ``alive`` is whether it
    may be used: where the allocation is work on a stream, only after that has run.
    """

    __slots__ = ("address", "alive", "buffer", "device", "memory", "nbytes", "owner")

    def __init__(self, device, nbytes, owner=None):
        self.buffer = np.empty(nbytes + ALIGNMENT + 2 * _MARGIN, np.uint8)
        begin = self.buffer.ctypes.data
        self.address = -(-(begin + _MARGIN) // ALIGNMENT) * ALIGNMENT
        offset = self.address - begin
        self.memory = self.buffer[offset : offset + nbytes]
        self.buffer.fill(POISON)
        self.device = device
        self.nbytes = nbytes
        self.owner = owner
        self.alive = owner is None


class Memory:
    """All allocations of all devices, whose bytes are limited.

    ``blocks`` has them by address, freed ones in quarantine included.
    """

    def __init__(self, limits):
        self.limits = limits
        self.used = [0] * len(limits)
        self.blocks: list[Allocation] = []
        self._quarantine: deque[Allocation] = deque()

    def live(self):
        return [block for block in self.blocks if block.alive]

    def allocate(self, device, nbytes):
        """Return the address of new memory, 0 if there is too little."""
        if self.used[device] + nbytes > self.limits[device]:
            return 0
        self.used[device] += nbytes
        return self.add(Allocation(device, nbytes)).address

    def add(self, block):
        self._forget_old()
        insort(self.blocks, block, key=_BY_ADDRESS)
        return block

    def free(self, address):
        """Free an allocation by its first address; return whether there was one."""
        block = self.find(address)
        if block is None or not block.alive or block.address != address:
            return False
        self.drop(block)
        return True

    def drop(self, block):
        """Free an allocation; a finaliser may do so during any other call."""
        self.used[block.device] -= block.nbytes
        self.end(block)
        self._quarantine.append(block)

    def end(self, block):
        """Forbid the use of an allocation from now on."""
        block.alive = False
        block.memory.fill(POISON)

    def _forget_old(self):
        kept = sum(x.nbytes for x in list(self._quarantine))
        while kept > _QUARANTINE_BYTES or len(self._quarantine) > _QUARANTINE_BLOCKS:
            block = self._quarantine.popleft()
            kept -= block.nbytes
            del self.blocks[self._index(block.address)]

    def _index(self, address):
        return bisect_right(self.blocks, address, key=_BY_ADDRESS) - 1

    def find(self, address):
        """Return the allocation that an address is in, freed ones included."""
        index = self._index(address)
        if index < 0:
            return None
        block = self.blocks[index]
        return block if address < block.address + max(block.nbytes, 1) else None

    def at(self, address, nbytes, device, what):
        """Return bytes of a device; raises Fault if any of them is not allocated, or is another device's."""
        block = self.find(address)
        if block is None:
            raise Fault(f"{what}: illegal address {address:#x}, where nothing is allocated")
        if not block.alive:
            raise Fault(
                f"{what}: illegal address {address:#x}, whose memory was freed, or not yet allocated"
            )
        if device is not None and block.device != device:
            raise Fault(
                f"{what}: address {address:#x} is on device {block.device}, not on {device}"
            )
        begin = address - block.address
        if begin + nbytes > block.nbytes:
            raise Fault(
                f"{what}: {nbytes} bytes at {address:#x} reach {begin + nbytes - block.nbytes} bytes over the end of "
                f"their allocation of {block.nbytes} bytes"
            )
        return block.memory[begin : begin + nbytes]
