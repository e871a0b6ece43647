"""Steps of a product on the device, each queued on a stream for the addresses of one call.

Batches with any strides are divided into kernel launches, which have at most three batch dimensions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from math import prod
from typing import Any, NamedTuple, TypeAlias

from lowprec.backends.cuda import runtime
from lowprec.backends.cuda.compiling import Launch
from lowprec.util.strides import Dimension, Shape, Shapes, coalesce, offsets_of

#: Batch dimensions of one launch.
_PER_LAUNCH = 3


class Addresses(NamedTuple):
    """Addresses of a product's arrays, 0 for none, with its factors.

    An operand that is not packed is its own packed operand; a result that is not staged is the product.
    """

    a: int = 0
    b: int = 0
    out: int = 0
    c: int = 0
    bias: int = 0
    packed_a: int = 0
    packed_b: int = 0
    product: int = 0
    #: Exponents or scales of rows of ``a`` and columns of ``b``, and those of the two that cuBLASLt applies.
    scales_a: int = 0
    scales_b: int = 0
    lt_scales_a: int = 0
    lt_scales_b: int = 0
    #: Numbers of the random numbers of quantised operands (``Rule.drawn``).
    draw_a: int = 0
    draw_b: int = 0
    alpha: complex = 1.0
    beta: complex = 0.0
    #: Address and bytes of cuBLASLt's workspace.
    workspace: tuple[int, int] = (0, 0)


#: Queues work for addresses on a stream of the current device; a product returns its invocation.
Step: TypeAlias = Callable[[Addresses, int], Any]

#: Fields of ``Addresses`` with offsets in bytes.
Used: TypeAlias = Sequence[tuple[str, int]]


def zeros(name: str, start: int, nbytes: int) -> Step:
    """Return the step that sets memory to zero, from an offset in a field of ``Addresses`` on."""

    def queue(addresses: Addresses, stream: int) -> None:
        address = getattr(addresses, name) + start
        runtime.call("cudaMemsetAsync", address, 0, nbytes, stream)

    return queue


def kernel_step(used: Used, launches: Sequence[Launch], *, has_factors: bool = False) -> Step:
    """Return the step of the first of several kernels whose ``masks`` the addresses fit.

    ``used`` is in the order of the kernel's parameters.
    """
    places = [(Addresses._fields.index(name), offset) for name, offset in used]

    def queue(addresses: Addresses, stream: int) -> None:
        at: list[int] = [addresses[index] + offset for index, offset in places]  # type: ignore[operator, misc]
        factors: tuple[float, ...] = ()
        if has_factors:
            alpha = addresses.alpha
            beta = addresses.beta
            factors = (alpha.real, alpha.imag, beta.real, beta.imag)
        fitting = (x for x in launches if not any(map(int.__and__, at, x.masks)))
        launch = next(fitting)
        launch(stream, *at, *factors)

    return queue


def queue_all(steps: Iterable[Step], addresses: Addresses, stream: int) -> None:
    for step in steps:
        step(addresses, stream)


class LaunchBatch(NamedTuple):
    """The batch of one launch; offsets and strides are in elements."""

    matrices: int  # of this launch
    before: int  # matrices of earlier launches
    offsets: Shape  # of the first matrix of each array
    extents: Shape  # of the two inner dimensions
    strides: Shapes  # of each array over the three dimensions


def batch_dimensions(shape: Sequence[int], *strides: Sequence[int]) -> list[Dimension]:
    """Return the dimensions of a batch of arrays with these strides."""
    of_dimensions = zip(*strides, strict=True)
    return list(zip(shape, of_dimensions, strict=True))


def launch_batches(dimensions: Sequence[Dimension], arrays: int) -> Iterator[LaunchBatch]:
    none: Dimension = (1, (0,) * arrays)
    dimensions = [none] * _PER_LAUNCH + coalesce(dimensions)
    outer = dimensions[:-_PER_LAUNCH]
    inner = dimensions[-_PER_LAUNCH:]
    extents, steps = zip(*inner, strict=True)
    matrices = prod(extents)
    strides = tuple(zip(*steps, strict=True))
    for number, offsets in enumerate(offsets_of(outer, arrays)):
        yield LaunchBatch(matrices, number * matrices, offsets, extents[1:], strides)


def are_multiples(nbytes: int, itemsize: int, strides: Sequence[int]) -> bool:
    """Whether all strides, given in elements, are multiples of ``nbytes`` bytes."""
    return not any(stride * itemsize % nbytes for stride in strides)
