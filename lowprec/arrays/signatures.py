"""Types of public functions, for type checkers: the result is an array of the first operand's library.

Classes of libraries that may be missing are not imported, but described by a method of theirs. Few overloads keep the
message on a misspelt mode short, because type checkers repeat the names of all modes for each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Concatenate, ParamSpec, Protocol, TypeVar, overload

    from lowprec.arrays.dlpack import DLPackArray

    P = ParamSpec("P")
    T = TypeVar("T", covariant=True)

    # T is NDArray[Any] of any ndarray, torch.Tensor also of an nn.Parameter, jax.Array
    class _ArrayOf(Protocol[T]):
        def clip(self, low: Any, high: Any, /) -> T: ...

    class _DLPack(Protocol):
        def __dlpack_device__(self) -> Any: ...

    class _OfFirst(Protocol[P]):  # a function of an array and further arguments
        @overload
        def __call__(self, a: _ArrayOf[T], /, *args: P.args, **kwargs: P.kwargs) -> T: ...
        @overload
        def __call__(self, a: _DLPack, /, *args: P.args, **kwargs: P.kwargs) -> DLPackArray: ...

    class _OfSecond(Protocol[P]):  # a function of a string, an array and further arguments
        @overload
        def __call__(self, s: str, a: _ArrayOf[T], /, *args: P.args, **kwargs: P.kwargs) -> T: ...
        @overload
        def __call__(
            self, s: str, a: _DLPack, /, *args: P.args, **kwargs: P.kwargs
        ) -> DLPackArray: ...


def of_first(function: Callable[Concatenate[Any, P], Any]) -> _OfFirst[P]:
    """Return the function, whose result has the type of its first argument."""
    return cast("_OfFirst[P]", function)


def of_second(function: Callable[Concatenate[str, Any, P], Any]) -> _OfSecond[P]:
    """Return the function, whose result has the type of its second argument."""
    return cast("_OfSecond[P]", function)
