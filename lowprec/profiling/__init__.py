"""Profiles: the products that ran, their times and the units used."""

from lowprec.profiling.recorder import profile
from lowprec.profiling.records import ProductRecord, RangeRecord

__all__ = ["ProductRecord", "RangeRecord", "profile"]
