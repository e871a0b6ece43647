"""What ran, how fast, on which units."""

from lowprec.profiling.recorder import profile
from lowprec.profiling.records import ProductRecord, RangeRecord

__all__ = ["ProductRecord", "RangeRecord", "profile"]
