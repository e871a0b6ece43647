"""Views of any library's arrays, and results as arrays of that library."""

from lowprec.arrays.base import Library
from lowprec.arrays.dlpack import DLPackArray
from lowprec.arrays.libraries import is_array, library_name, library_of
from lowprec.arrays.view import CPU, NUMPY_DTYPES, ArrayView, Device, may_overlap
