"""Tensor-core arithmetic, bit by bit."""

from __future__ import annotations

from lowprec.backends.cpu.emulation.arithmetic import Arithmetic, arithmetic, formats_of, kernels
from lowprec.backends.cpu.emulation.products import multiply
