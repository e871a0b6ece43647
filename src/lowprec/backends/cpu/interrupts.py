"""Telling an error of a call from the exception of a signal handler that ran while the call was being made.

Where an error means "it is not there" and the answer is kept, or where it is passed over, a handler's exception (a time
limit, say, which is often a ``TimeoutError`` and so an ``OSError``) must not be taken for it.
"""

from __future__ import annotations


def raised_in(error: BaseException, *modules: str) -> bool:
    """Whether an exception was raised in one of these modules or packages, by name; calls of C belong to their caller.

    Examples
    --------
    >>> import json
    >>> try:
    ...     json.loads("[")
    ... except ValueError as error:
    ...     raised_in(error, __name__), raised_in(error, __name__, "json.decoder")
    (False, True)
    """
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    if traceback is None:
        return False
    name = traceback.tb_frame.f_globals.get("__name__", "")
    packages = tuple([f"{module}." for module in modules])
    return name in modules or name.startswith(packages)
