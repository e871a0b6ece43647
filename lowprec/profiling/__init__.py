"""Profiles: the products that ran, their times and the units used."""

from lowprec.profiling.recorder import profile
from lowprec.profiling.records import ProductRecord

__all__ = ["ProductRecord", "profile"]
