"""Stream order of a product on a GPU.

A product runs on the current stream of the library of ``a``. The current streams of other arguments' libraries are
joined with it: the product waits for them, and they wait for the product. A library with ``keeps_owners`` may reuse the
memory of a freed array on an unknown stream, so its arrays live until the product has run.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from lowprec.arrays import ArrayView, Library, library_of
from lowprec.arrays.device_memory import provider
from lowprec.backends import Arguments, Executor


def run(execute: Executor, arguments: Arguments, library: Library, arrays: tuple[Any, ...]) -> None:
    """Execute a product on a GPU in stream order with the libraries of its arguments.

    ``library`` is that of ``a``; ``arrays`` are a, b, out, c, bias, scale_a and scale_b. Streams also wait, and arrays
    are kept, after an exception, because part of the work may be queued.
    """
    kind = type(arrays[0])
    joined = library.keeps_owners or bool(arguments.a.blocks or arguments.b.blocks)
    for other in arrays:
        if type(other) is not kind and other is not None:
            joined = joined or (hasattr(other, "__dlpack__") and library_of(other) is not library)
    if not joined:
        execute(arguments)
        return
    device = arguments.a.device
    stream = arguments.stream
    views = (*arguments[:5], arguments.scale_a, arguments.scale_b)
    others: dict[int, None] = {}
    owners = []
    for array, view in zip(arrays, views, strict=True):
        if isinstance(view, ArrayView) and (source := view.source(array)) is not None:
            library = library_of(source)
            others[library.current_stream(device) or stream] = None
            if library.keeps_owners:
                owners.append(view.owner)
    others.pop(stream, None)
    memory = provider(device)
    if others:
        memory.check_captures((stream, *others), device)
    with ExitStack() as afterwards:
        if owners:
            memory.hold(owners, device)
            afterwards.callback(memory.keep, owners, stream, device)
        for other in others:
            memory.order(other, stream, device)
            afterwards.callback(memory.order, stream, other, device)
        execute(arguments)
