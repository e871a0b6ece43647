"""Puts the CUDA backend back to where it was before its first product, on whichever libraries are in use."""

from contextlib import ExitStack

from lowprec.backends.cuda import (
    autotune,
    cublas,
    executor,
    handles,
    invocation,
    libraries,
    memory,
    models,
    runtime,
    sparse,
)  # fmt: skip
from lowprec.backends.cuda.runtime import call, on_device


def reset():
    """Give back handles, events and pooled memory, each also where another fails; no product may be running.

    Executors stay valid and create what they need at their next call.
    """
    executor._refusal.cache_clear()
    invocation._failures.cache_clear()
    sparse._product.cache_clear()
    autotune._stored.cache_clear()
    models.present.cache_clear()
    with ExitStack() as stack:
        stack.callback(_events, memory._pools, lambda pool: pool.events)
        stack.callback(memory.release)
        stack.callback(release_timing_events)
        stack.callback(_handles, cublas._pool, "cublas")
        stack.callback(_handles, sparse._pool, "cusparse_lt")
        stack.callback(_handles, handles._cublas_lt, "cublas_lt")
        stack.callback(handles._streams.__init__, runtime.create_stream)


def release_timing_events():
    """Destroy the events of unused stopwatches."""
    _events(autotune._idle, lambda events: events)


def _events(by_device, idle):
    found = libraries.loaded()
    for (owner, device), kept in list(by_device.items()):
        if found is not None and owner is found.runtime:
            with on_device(device):
                while idle(kept):
                    call("cudaEventDestroy", idle(kept).pop())


def _handles(pool, library):
    devices = dict(pool.devices)
    pool.__init__(pool._create, pool._reset)  # threads that live on have leases of the old one
    with ExitStack() as stack:
        for handle, device in devices.items():
            stack.callback(_destroy, handle, device, library)


def _destroy(handle, device, library):
    with on_device(device):
        getattr(libraries.libraries(), library).destroy(handle)
