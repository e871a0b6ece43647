"""The objects of the software cuBLASLt: handles, descriptors of operations, layouts, preferences.

Source: the cuBLAS documentation, *Using the cuBLASLt API*, and ``cublasLt.h``.
"""

import functools
import os
import threading
import time

import numpy as np
from nvmath.bindings import cublasLt as real

from software_cuda.attributes import attributes
from software_cuda.objects import (
    INTERNAL_ERROR,
    Handle,
    Object,
    Registry,
    Use,
    cublas_error,
    known_attribute,
    set_attribute,
    write_attribute,
)
from software_cuda.recorder import Refusal, function

DESCRIPTOR, LAYOUT, PREFERENCE, EMULATION = KINDS = (
    "matmul_desc", "matrix_layout", "matmul_preference", "emulation_desc",
)  # fmt: skip


SoftwareLtError = functools.partial(cublas_error, real.cuBLASLtError)


class Objects(Registry):
    """Creates, changes and destroys them."""

    error_kind = "cuBLASLtError"
    harmless = frozenset(
        f"get_{x}_attribute_dtype" for x in (*KINDS, "matmul_algo_config", "matmul_algo_cap")
    )

    def __init__(self, recorder, runtime, version):
        super().__init__("cublas_lt", real, recorder, runtime)
        self.version = version
        self._known = {kind: attributes(kind, version) for kind in KINDS}
        self.tf32_forbidden: bool | None = None

    def live(self):
        names = ("handles", "descriptors", "layouts", "preferences", "emulations")
        return {
            name: self.count(kind) for name, kind in zip(names, ("handle", *KINDS), strict=True)
        }

    @function
    def get_version(self):
        return self.version

    @function
    def create(self):
        if self.tf32_forbidden is None:  # once per process, at the first handle
            self.tf32_forbidden = os.environ.get("NVIDIA_TF32_OVERRIDE") == "0"
        return self.add(Handle("handle", self.runtime))

    @function
    def destroy(self, handle):
        self.destroy_handle(handle)

    @function
    def matmul_desc_create(self, compute_type, scale_type):
        return self._created(
            DESCRIPTOR, real.MatmulDescAttribute, COMPUTE_TYPE=compute_type, SCALE_TYPE=scale_type
        )

    @function
    def matrix_layout_create(self, data_type, rows, cols, ld):
        return self._created(
            LAYOUT, real.MatrixLayoutAttribute, TYPE=data_type, ROWS=rows, COLS=cols, LD=ld
        )

    @function
    def matmul_preference_create(self):
        return self.add(Object(PREFERENCE))

    @function
    def emulation_desc_create(self):
        if not self._known[EMULATION]:
            raise Refusal(INTERNAL_ERROR, f"there is no such function in {self.version}")
        return self.add(Object(EMULATION))

    def _created(self, kind, names, **values):
        made = Object(kind)
        for name, value in values.items():
            dtype = getattr(real, f"get_{kind}_attribute_dtype")(names[name])
            made.attributes[int(names[name])] = np.array(value).astype(dtype).tobytes()
        return self.add(made)

    def let_others_run(self):
        if threading.active_count() > 1:
            time.sleep(0)


def _functions(kind):
    """Return the functions that all kinds of objects have."""

    def destroy(self, number):
        if number:  # 0 is allowed, as in free(NULL)
            self.remove(number, kind)

    def set_value(self, number, *rest):
        found = self.get(number, kind)
        with Use(found, self.recorder):
            self.let_others_run()
            set_attribute(found, self._known[kind], *rest)

    def get_value(self, number, attribute, *rest):
        found, row = self.get(number, kind), known_attribute(self._known[kind], attribute)
        write_attribute(found.attributes.get(row.number, row.first), *rest)

    return {"destroy": destroy, "set_attribute": set_value, "get_attribute": get_value}


for _kind in KINDS:
    for _name, _method in _functions(_kind).items():
        _method.__name__ = f"{_kind}_{_name}"
        setattr(Objects, _method.__name__, function(_method))
