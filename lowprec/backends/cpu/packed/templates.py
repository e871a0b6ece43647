"""Operands under the name by which `backends.cpu.epilogue` imports them."""

from lowprec.backends.cpu.packed.jobs import anywhere as anywhere
from lowprec.backends.cpu.packed.jobs import operand_of as operand_of
