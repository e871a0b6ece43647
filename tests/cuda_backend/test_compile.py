"""The compiler of the kernels, and the cache of compiled code."""

import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from lowprec import errors
from lowprec.backends.cuda import compiling, libraries
from lowprec.backends.cuda.epilogue import Epilogue, prepare_epilogue
from lowprec.backends.cuda.packing import prepare_packing
from lowprec.errors import BackendError, LowprecWarning
from lowprec.formats import DType as D
from lowprec.planning import MatrixStack
from lowprec.planning.cublaslt.calls import Packing
from support.recording_compiler import recording, runtime


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty folder for the cache, which does not exist yet."""
    monkeypatch.setenv("LOWPREC_CACHE_DIR", str(tmp_path / "cache"))
    errors._given.clear()
    return tmp_path / "cache"


@pytest.fixture
def core(cache):
    """A compiler that has compiled nothing."""
    forget()
    with recording() as found:
        yield found


def forget():
    """Forget the kernels in memory, as a new process would."""
    compiling._load.cache_clear()


def kernel(**definitions):
    return compiling.kernel("epilogue", "epilogue.cu", definitions, 0)


# -- messages -------------------------------------------------------------------------------------


@pytest.fixture
def nvrtc(core):
    real = pytest.importorskip("cuda.core", reason="cuda-core is not installed")
    try:
        options = real.ProgramOptions(arch="sm_90")
        real.Program('extern "C" __global__ void f() {}', "c++", options).compile("cubin")
    except Exception as error:
        if "nvrtc" not in str(error).lower():
            raise
        pytest.skip("NVRTC is not installed")
    return real


def test_the_compilers_message_is_passed_on(nvrtc):
    with pytest.raises(BackendError, match=r"(?s)epilogue was not compiled for sm_90.*PRODUCT"):
        compiling._compiled(nvrtc, "sm_90", "epilogue", compiling.source_text("epilogue.cu"))


def test_a_missing_compiler_is_named(core):
    core.error = "nvrtc: libnvrtc.so.13 not found\n" + "\n".join(f"line {i}" for i in range(50))
    forget()
    with pytest.raises(
        BackendError, match=r"(?s)epilogue was not compiled for sm_90: .*libnvrtc.*its extra cuda13"
    ) as caught:
        kernel(A=1)
    assert "line 6" in str(caught.value)
    assert "line 7" not in str(caught.value)


# -- compiled once --------------------------------------------------------------------------------


def test_a_kernel_is_compiled_once(core):
    first = kernel(A=1)
    assert kernel(A=1) is first
    source, options = core.compiled[0]
    assert source.startswith("#define A 1\n")
    assert "epilogue(" in source
    assert options == {"arch": "sm_90", "std": "c++17", "fma": False}
    assert kernel(A=2) is not first
    assert len(core.compiled) == 2


def test_each_architecture_has_its_own(core):
    kernel()
    libraries.use(libraries.Libraries(None, None, runtime((8, 0)), core, None, None))
    kernel()
    assert [options["arch"] for _, options in core.compiled] == ["sm_90", "sm_80"]


def test_threads_that_start_together_compile_once(core):
    together = threading.Barrier(8)

    def work():
        together.wait()
        kernel(A=1)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(core.compiled) == 1


def test_the_arguments_of_a_launch(core):
    source = MatrixStack.of(D.FLOAT32, 2, 3, 8, 2, (5,), (100,))
    prepare_packing(Packing(source, D.BFLOAT16, 4, 2), 0)(64, 128, 0, 77)
    stream, extents, name, *arguments = core.launched[0]
    assert (stream, name, extents) == (77, "pack_elements", (1, 1, 1, 256, 1, 1))
    steps = (4, 8, 8)  # elements from line to line, from matrix to matrix, and from part to part
    assert arguments == [64, 128, 2, 3, 8, 2, 2, 4, *steps, 5, 1, 5, 0, 0, 100]


def test_the_next_launch_has_its_own_addresses_and_factors(core):
    out = MatrixStack.of(D.FLOAT16, 5, 7, 7, 1)
    launch = prepare_epilogue(Epilogue(D.FLOAT32, 7, out), 0)
    for number in (1, 2):
        launch(64 * number, 128 * number, 0, 0, 0, 0, 0.5 * number, 2j, number)
    for number, (stream, _, _, *arguments) in enumerate(core.launched, 1):
        assert (stream, arguments[:2]) == (number, [64 * number, 128 * number])
        factors = np.array(arguments[-4:]).view(np.float64)
        np.testing.assert_array_equal(factors, [0.5 * number, 0, 0, 2])
    assert core.launched[0][5:-4] == core.launched[1][5:-4]
    assert len(core.described) == 1


def test_contiguous_matrices_are_one_line(core):
    source = MatrixStack.of(D.FLOAT32, 5, 7, 7, 1, (3,), (35,))
    prepare_packing(Packing(source, D.BFLOAT16, 7, 5), 0)(64, 128, 0, 1)
    out = MatrixStack.of(D.FLOAT16, 5, 7, 7, 1, (3,), (35,))
    prepare_epilogue(Epilogue(D.FLOAT32, 7, out), 0)(64, 128, 0, 0, 0, 0, 1.0, 0.0, 1)
    packed, epilogue = core.launched
    assert packed[2] == "pack_groups"
    assert packed[5:7] == epilogue[5:7] == (1, 105)


# -- the cache on disk ----------------------------------------------------------------------------


def files(cache):
    return sorted(path for path in cache.rglob("*") if path.is_file())


def test_another_process_finds_it_on_disk(core, cache):
    code = kernel(A=1).code
    assert [path.parent.name for path in files(cache)] == ["kernels"]
    forget()
    assert kernel(A=1).code == code
    assert len(core.compiled) == 1
    assert core.loaded == [code, code]


def test_another_version_compiles_again(core, cache, monkeypatch):
    for change in (
        lambda: None,
        lambda: setattr(core, "__version__", "2"),
        lambda: monkeypatch.setattr(compiling, "_nvrtc_version", lambda: "99.0"),
        lambda: monkeypatch.setattr(compiling, "_OPTIONS", {"std": "c++20"}),
    ):
        change()
        forget()
        kernel(A=1)
    assert len(core.compiled) == len(files(cache)) == 4


@pytest.mark.parametrize(("status", "version"), [(0, "13.1"), (4, "")])
def test_the_compilers_version_is_known_where_it_reports(status, version, monkeypatch):
    """Otherwise unwritten numbers would pass for results."""
    nvrtc = SimpleNamespace(nvrtcVersion=lambda: (status, 13, 1))
    monkeypatch.setitem(sys.modules, "cuda.bindings.nvrtc", nvrtc)
    assert compiling._nvrtc_version() == version


@pytest.mark.parametrize("damage", ["cut", "empty", "flipped"])
def test_a_damaged_kernel_is_compiled_again(damage, core, cache):
    kernel(A=1)
    (path,) = files(cache)
    data = path.read_bytes()
    path.write_bytes({"cut": data[:-1], "empty": b"", "flipped": data[:-1] + b"?"}[damage])
    forget()
    with pytest.warns(LowprecWarning, match="epilogue_sm_90.*it is damaged; it is written again"):
        kernel(A=1)
    assert len(core.compiled) == 2
    assert files(cache) == [path]
    assert path.read_bytes() == data


def test_a_kernel_that_the_driver_refuses_is_compiled_again(core, cache):
    code = kernel(A=1).code
    (path,) = files(cache)
    old = code + b"old"
    path.write_bytes(compiling.hashlib.sha256(old).digest() + old)
    core.refuses = (old,)
    forget()
    with pytest.warns(LowprecWarning, match="the driver does not load it: CUDA_ERROR_INVALID"):
        assert kernel(A=1).code == code
    assert len(core.compiled) == 2


def test_new_code_that_the_driver_refuses_is_an_error_and_is_not_kept(core, cache):
    code = kernel(A=1).code
    (path,) = files(cache)
    path.unlink()
    core.refuses = (code,)
    forget()
    with pytest.raises(BackendError, match=r"cannot load kernel epilogue for sm_90: CUDA_ERROR_INVALID"):
        kernel(A=1)
    assert files(cache) == []
