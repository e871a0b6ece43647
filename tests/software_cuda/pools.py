"""Stream-ordered memory of the software CUDA: pools, and allocations that are work on a stream or nodes of a graph.

Memory may be used after its allocation has run and until its free has, which is checked. Sources: the CUDA Runtime API
reference, *Stream Ordered Memory Allocator*, and the CUDA C++ Programming Guide, *Graph Memory Nodes*.
"""

import threading
from dataclasses import dataclass

from cuda.bindings import runtime as real

from software_cuda.machine import Machine, Refusal, Status, api
from software_cuda.memory import Allocation

_ON_DEVICE = real.cudaMemLocationType.cudaMemLocationTypeDevice


@dataclass
class Pool:
    """Memory from the system: ``unused`` bytes that no one uses at the moment, ``threshold`` bytes that may stay so."""

    device: int
    unused: int = 0
    threshold: int = 0


class Pools(Machine):
    """The functions of the runtime for stream-ordered memory."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.pools: dict[int, Pool] = {}

    @api(1, unsafe=True)
    def cudaMemPoolCreate(self, properties):
        place, kinds = properties.location, real.cudaMemAllocationType
        if (properties.allocType, place.type) != (kinds.cudaMemAllocationTypePinned, _ON_DEVICE):
            raise Refusal(Status.cudaErrorInvalidValue)
        if not self.model(place.id).has_pools:
            raise Refusal(Status.cudaErrorNotSupported)
        if any(x.thread == threading.get_ident() for x in self.captures):
            raise Refusal(Status.cudaErrorStreamCaptureUnsupported)
        handle = next(self.handles)
        self.pools[handle] = Pool(place.id)
        return real.cudaMemPool_t(handle)

    @api(unsafe=True)
    def cudaMemPoolSetAttribute(self, pool, attribute, value):
        value.getPtr()  # the bindings take a cuuint64_t, and no int
        assert attribute == real.cudaMemPoolAttr.cudaMemPoolAttrReleaseThreshold, (
            "others are not modelled"
        )
        self.pools[int(pool)].threshold = int(value)

    @api(unsafe=True)
    def cudaMemPoolTrimTo(self, pool, nbytes):
        self._trim(self.pools[int(pool)], nbytes)

    def _trim(self, pool, nbytes):
        excess = max(pool.unused - nbytes, 0)
        pool.unused -= excess
        self.memory.used[pool.device] -= excess

    @api()
    def cudaDeviceGraphMemTrim(self, device):
        self.model(device)

    def wait(self, targets):
        super().wait(targets)
        for pool in self.pools.values():
            self._trim(pool, pool.threshold)

    @api(1)
    def cudaMallocFromPoolAsync(self, nbytes, pool, stream):
        found, source = self.stream(stream), self.pools[int(pool)]
        if not nbytes or source.device != found.device:
            raise Refusal(Status.cudaErrorInvalidValue)
        self.check_capture(found)
        owner = found.capture
        if owner is None:
            owner = source
            self._take(source, nbytes)
        block = self.memory.add(Allocation(found.device, nbytes, owner))

        def begin():
            block.alive = True

        self.enqueue(found, "cudaMallocAsync", begin)
        if found.capture is not None:
            found.capture.allocated.add(block.address)
        return block.address

    def _take(self, pool, nbytes):
        """Count memory as used, that of the pool first."""
        used, limits, device = self.memory.used, self.memory.limits, pool.device
        new = max(nbytes - pool.unused, 0)
        if used[device] + new > limits[device]:
            raise Refusal(Status.cudaErrorMemoryAllocation)
        used[device] += new
        pool.unused -= nbytes - new

    @api()
    def cudaFreeAsync(self, address, stream):
        found, block, capture = (
            self.stream(stream),
            self.memory.find(address),
            self.stream(stream).capture,
        )
        self.check_capture(found)
        owned = isinstance(block.owner, Pool) if capture is None else address in capture.allocated
        if not owned or block.address != address:
            self.recorder.faults.append(
                f"cudaFreeAsync of {address:#x}, which is not allocated there"
            )
            raise Refusal(Status.cudaErrorInvalidValue)
        if capture is not None:
            capture.allocated.remove(address)
            self.enqueue(found, "cudaFreeAsync", lambda: self.memory.end(block))
        else:
            block.owner = (block.owner,)  # which is freed once
            self.enqueue(found, "cudaFreeAsync", lambda: self._give(block))

    def free_of_pool(self, address):
        """Free memory of a pool now, as ``cudaFree`` does for memory that no work uses; False for other memory."""
        block = self.memory.find(address)
        if block is None or block.address != address or not isinstance(block.owner, Pool):
            return False
        block.owner = (block.owner,)
        self._give(block)
        return True

    def _give(self, block):
        (pool,) = block.owner
        self.memory.drop(block)
        self.memory.used[block.device] += block.nbytes
        pool.unused += block.nbytes

    def live(self):
        found = super().live()
        found["bytes"] -= sum(x.unused for x in self.pools.values())
        return found
