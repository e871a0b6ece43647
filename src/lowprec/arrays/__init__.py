"""Arrays in and out: views of any library's arrays, and results handed back as arrays of that library."""

from lowprec.arrays.base import Library
from lowprec.arrays.dlpack import DLPackArray
from lowprec.arrays.libraries import library_name, library_of
from lowprec.arrays.view import CPU, NUMPY_DTYPES, ArrayView, Device, may_overlap

__all__ = [
    "CPU",
    "NUMPY_DTYPES",
    "ArrayView",
    "DLPackArray",
    "Device",
    "Library",
    "library_name",
    "library_of",
    "may_overlap",
]
