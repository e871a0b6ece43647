"""What an interception has seen: products that lowprec multiplied, and those that passed by it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import unique

from lowprec.util.enums import StrEnum
from lowprec.util.tables import Table, plain_text


@unique
class PassedBy(StrEnum):
    """Why a product was left to PyTorch."""

    ELEMENT_TYPE = "no mode acts on this element type"
    ATTENTION = "attention in one kernel, which hides its products"
    CONVOLUTION = "a convolution is no matrix product"
    RECURRENT = "recurrent layers in one kernel, which hides their products"
    FUSED = "a fused kernel, which hides its products"
    LINEAR_ALGEBRA = "a solver or a factorisation, not a product"
    REFUSED = "refused by lowprec"


@dataclass(frozen=True, slots=True)
class InterceptedProduct:
    """Products of one kind.

    Parameters
    ----------
    operator : str
        PyTorch's name of it: ``"addmm"``.
    shapes : tuple of tuple of int
        Of the two operands; of all tensors, where it passed by.
    dtype : str
    backward : bool
        Whether a backward pass ran it.
    mode : str
        In force; empty where it passed by.
    count : int
        How many there were.
    passed_by : PassedBy or None
        Why it was left to PyTorch; None where lowprec multiplied.
    detail : str
        What lowprec said of it, where it refused.
    """

    operator: str
    shapes: tuple[tuple[int, ...], ...]
    dtype: str
    backward: bool
    mode: str
    count: int
    passed_by: PassedBy | None = None
    detail: str = ""

    @property
    def reason(self) -> str:
        """Why it was left to PyTorch, in words; empty where lowprec multiplied."""
        words = (str(self.passed_by or ""), self.detail)
        return ": ".join(filter(None, words))


@dataclass(frozen=True, slots=True)
class InterceptionReport:
    """The products of an interception; ``print`` shows them as tables.

    Parameters
    ----------
    mode : str
        As it was asked for.
    products : tuple of InterceptedProduct
    remarks : tuple of str
        What the reader should know of the counts.
    """

    mode: str
    products: tuple[InterceptedProduct, ...]
    remarks: tuple[str, ...] = ()

    @property
    def taken(self) -> tuple[InterceptedProduct, ...]:
        """Those that lowprec multiplied."""
        return tuple(p for p in self.products if p.passed_by is None)

    @property
    def passed(self) -> tuple[InterceptedProduct, ...]:
        """Those that were left to PyTorch."""
        return tuple(p for p in self.products if p.passed_by is not None)

    def __str__(self) -> str:
        taken, passed = self.taken, self.passed
        summary = (
            f"lowprec.torch.intercept({self.mode!r}): {_count(taken)} taken "
            f"({_count(p for p in taken if p.backward)} in backward passes), {_count(passed)} passed by"
        )
        text = [summary]
        if taken:
            text += [_table("taken", [("mode", p.mode) for p in taken], taken)]
        if passed:
            text += [_table("passed by", [("why", p.reason) for p in passed], passed)]
        return "\n".join([*text, *self.remarks])


def _count(products: Iterable[InterceptedProduct]) -> int:
    return sum(p.count for p in products)


def _table(
    title: str, last: list[tuple[str, str]], products: tuple[InterceptedProduct, ...]
) -> str:
    rows = [
        [p.operator, _shapes(p), p.dtype, "backward" if p.backward else "forward", str(p.count), words]
        for p, (_, words) in zip(products, last, strict=True)
    ]  # fmt: skip
    columns = ["operator", "operands", "dtype", "pass", ">calls", last[0][0]]
    return plain_text(Table(title, columns, rows), wrap=120)


def _shapes(product: InterceptedProduct) -> str:
    return " @ ".join("x".join(map(str, shape)) or "scalar" for shape in product.shapes)
