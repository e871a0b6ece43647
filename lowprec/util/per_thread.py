"""Values of each thread."""

from __future__ import annotations

import threading
from typing import Any


class PerThread(threading.local):
    """Attributes that every thread sets for itself, and their first values.

    >>> PerThread(counted=0).counted
    0
    """

    def __init__(self, **first: Any) -> None:
        # The compiler of PyTorch 2.11 would read a class attribute instead of the thread's value.
        vars(self).update(first)
