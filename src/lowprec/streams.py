"""The order of a product on a GPU among the work of the libraries whose arrays it takes.

A product runs on one stream: the current one of the library of ``a``. Where an array is another library's, it waits
for that library's stream, which waits for it afterwards. Arrays of libraries that would reuse their memory on streams
which they do not tell (``Library.keeps_owners``) are held until the product is done.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from lowprec.arrays import ArrayView, Library, library_of
from lowprec.arrays.device_memory import provider
from lowprec.backends import Executor
from lowprec.request import Request

__all__ = ["run"]


def run(
    execute: Executor,
    request: Request,
    x: ArrayView,
    y: ArrayView,
    target: ArrayView,
    arrays: tuple[Any, ...],
) -> None:
    """Execute a product on a device, in the order of its arrays' libraries.

    If it raises, the streams wait for each other all the same, and arrays are held: a part may have been queued.

    Parameters
    ----------
    execute : Executor
    request : Request
    x, y, target : ArrayView
        The operands, and where the result goes.
    arrays : tuple
        What the caller passed as a, b, out, c, bias, scale_a and scale_b, in this order; None for what was not given.
    """
    a = arrays[0]
    kind = type(a)
    library = library_of(a)
    stream = library.current_stream(x.device) or 0
    joined = library.keeps_owners
    for other in arrays:
        if type(other) is not kind and other is not None:
            joined = joined or _is_foreign(other, library)
    if joined:
        _run_joined(execute, request, x, y, target, arrays, stream)
    else:
        execute(request.arguments(x, y, target, stream))


def _is_foreign(other: Any, library: Library) -> bool:
    """Whether this is another library's array; a scale may be a number."""
    return hasattr(other, "__dlpack__") and library_of(other) is not library


def _run_joined(
    execute: Executor,
    request: Request,
    x: ArrayView,
    y: ArrayView,
    target: ArrayView,
    arrays: tuple[Any, ...],
    stream: int,
) -> None:
    device = x.device
    views = (
        x, y, request.out, request.c, request.bias, request.scale_a, request.scale_b
    )  # fmt: skip
    others: dict[int, None] = {}
    owners = []
    for array, view in zip(arrays, views, strict=True):
        if isinstance(view, ArrayView):
            library = library_of(array)
            others[library.current_stream(device) or stream] = None
            if library.keeps_owners:
                owners.append(view.owner)
    others.pop(stream, None)
    memory = provider(device)
    with ExitStack() as afterwards:
        if owners:
            memory.hold(owners, device)
            afterwards.callback(memory.keep, owners, stream, device)
        for other in others:
            memory.order(other, stream, device)
            afterwards.callback(memory.order, stream, other, device)
        execute(request.arguments(x, y, target, stream))
