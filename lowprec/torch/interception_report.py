"""Report of an interception: products computed by lowprec, and those left to PyTorch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import unique

from lowprec.util.plain import StrEnum
from lowprec.util.tables import Table, fill, plain_text


@unique
class PassedBy(StrEnum):
    """The reason why PyTorch computed a product.

    >>> str(PassedBy.CONVOLUTION)
    'a convolution is no matrix product'
    """

    ELEMENT_TYPE = "the mode does not act on this element type"
    ATTENTION = "attention in one kernel, which hides its products"
    CONVOLUTION = "a convolution is no matrix product"
    RECURRENT = "recurrent layers in one kernel, which hides their products"
    FUSED = "a fused kernel, which hides its products"
    LINEAR_ALGEBRA = "a solver or a factorisation, not a product"
    REFUSED = "refused by lowprec"


@dataclass(frozen=True, slots=True)
class InterceptedProduct:
    """Products with the same properties.

    >>> import torch
    >>> from lowprec.torch import intercept
    >>> with intercept("bf16") as seen:
    ...     c = torch.ones(4, 8) @ torch.ones(8, 2)
    >>> seen.report().products[0].shapes
    ((4, 8), (8, 2))
    """

    operator: str  #: PyTorch's name, such as ``"addmm"``.
    shapes: tuple[tuple[int, ...], ...]  #: Of the two operands; of all tensors where PyTorch computed it.
    dtype: str  #: Element type of the first operand.
    backward: bool  #: Whether they were part of a backward pass.
    mode: str  #: The resolved mode; empty where PyTorch computed it.
    count: int  #: Number of such products.
    passed_by: PassedBy | None = None  #: The reason why PyTorch computed it; None where lowprec did.
    detail: str = ""  #: The error message, where lowprec raised one.

    @property
    def reason(self) -> str:
        """Why PyTorch computed it, as text; empty where lowprec did."""
        return ": ".join(filter(None, (str(self.passed_by or ""), self.detail)))


@dataclass(frozen=True, slots=True)
class InterceptionReport:
    """The products of an interception; ``print`` shows them as tables.

    >>> import torch
    >>> from lowprec.torch import intercept
    >>> with intercept("bf16") as seen:
    ...     c = torch.ones(4, 8) @ torch.ones(8, 2)
    >>> seen.report().mode
    'bf16'
    """

    mode: str  #: The requested mode.
    products: tuple[InterceptedProduct, ...]
    remarks: tuple[str, ...] = ()  #: Notes on the counts.

    @property
    def taken(self) -> tuple[InterceptedProduct, ...]:
        """The products that lowprec computed."""
        return tuple(p for p in self.products if p.passed_by is None)

    @property
    def passed(self) -> tuple[InterceptedProduct, ...]:
        """The products that PyTorch computed."""
        return tuple(p for p in self.products if p.passed_by is not None)

    def __str__(self) -> str:
        return self.table()

    def table(self, width: int = 120) -> str:
        """Return the report as text tables with lines of this many characters."""
        taken, passed = self.taken, self.passed
        summary = (
            f"lowprec.torch.intercept({self.mode!r}): {_count(taken)} taken "
            f"({_count(p for p in taken if p.backward)} in backward passes), {_count(passed)} passed by"
        )
        tables = [_table("taken", "mode", taken)] if taken else []
        tables += [_table("passed by", "why", passed)] if passed else []
        remarks = (fill(text, width) for text in self.remarks)
        return "\n".join([fill(summary, width), *(plain_text(each, width) for each in tables), *remarks])


def _count(products: Iterable[InterceptedProduct]) -> int:
    return sum(p.count for p in products)


def _table(title: str, last: str, products: tuple[InterceptedProduct, ...]) -> Table:
    rows = []
    for p in products:
        shapes = " @ ".join("x".join(map(str, shape)) or "scalar" for shape in p.shapes)
        direction = "backward" if p.backward else "forward"
        rows.append([p.operator, shapes, p.dtype, direction, str(p.count), p.mode or p.reason])
    columns = ["operator", "operands", "dtype", "pass", ">calls", last]
    return Table(title, columns, rows, ("pass", "dtype"))
