"""The sections: what each asks, how long it may take, whether it needs a GPU."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Section:
    """One part of the report.

    Parameters
    ----------
    name : str
        On the command line and in the file.
    limit_s : float
        Seconds after which it is stopped.
    needs_gpu : bool
    what : str
        The question.
    module : str
        With `run(part, options)`.
    """

    name: str
    limit_s: float
    needs_gpu: bool
    what: str

    @property
    def module(self) -> str:
        """Where its function `run` is."""
        return f"gpu.{self.name}"


#: In the order in which they run: what matters most comes first, because time may run out. All but the last fit into
#: eight minutes even if each takes all of its own.
SECTIONS = {
    section.name: section
    for section in (
        Section("device", 40, False, "Which machine, which versions?"),
        Section("accuracy", 50, False, "Is every error within the plan's bound?"),
        Section("features", 30, True, "Does each feature work on torch tensors?"),
        Section("graphs", 20, True, "Does a captured product replay bit by bit?"),
        Section("streams", 25, True, "Are results right on any library's streams?"),
        Section("host", 20, True, "How long is the host busy with a small product?"),
        Section("speed", 120, True, "How fast beside torch, CuPy and nvmath?"),
        Section("epilogues", 15, True, "Which epilogues does cuBLASLt take for which types?"),
        Section("override", 35, True, "What does NVIDIA_TF32_OVERRIDE do?"),
        Section("rounding", 10, True, "How does FAST_TF32 round its operands?"),
        Section("beta", 15, True, "Is C added in FP32, to nearest? Does split-K keep FP32?"),
        Section("heuristics", 25, True, "How far is the first choice from the best of 32?"),
        # Takes what the others have left.
        Section("tests", 200, False, "Do the tests of the CUDA backend pass?"),
    )
}

#: Seconds for all of it.
TOTAL_S = 475.0
