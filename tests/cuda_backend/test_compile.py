"""The compiler of the kernels, and the cache of compiled code."""

import sys
from types import SimpleNamespace

import pytest

from lowprec import errors
from lowprec.backends.cuda import compiling, libraries
from lowprec.backends.cuda.epilogue import Epilogue, prepare_epilogue
from lowprec.backends.cuda.packing import prepare_packing
from lowprec.backends.cuda.steps import Addresses, queue_all
from lowprec.errors import BackendError, LowprecWarning
from lowprec.formats import DType as D
from lowprec.planning import MatrixStack
from lowprec.planning.cublaslt.calls import Packing
from support.programs import in_threads
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


def test_a_missing_compiler_is_named(core):
    core.error = "nvrtc: libnvrtc.so.13 not found\n" + "\n".join(f"line {i}" for i in range(50))
    forget()
    with pytest.raises(
        BackendError,
        match=r"(?s)epilogue was not compiled for sm_90: nvrtc: .*line 6\nNVRTC.*cuda13",
    ):
        kernel(A=1)


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
    libraries.use(SimpleNamespace(runtime=runtime((8, 0)), core=core, driver=None))
    kernel()
    assert [options["arch"] for _, options in core.compiled] == ["sm_90", "sm_80"]


def test_threads_that_start_together_compile_once(core):
    in_threads(8, lambda _: kernel(A=1))
    assert len(core.compiled) == 1


def test_contiguous_matrices_are_one_line(core):
    source = MatrixStack.of(D.FLOAT32, 5, 7, 7, 1, (3,), (35,))
    queue_all(
        prepare_packing(Packing(source, D.BFLOAT16, 7, 5), 0), Addresses(a=64, packed_a=128), 1
    )
    out = MatrixStack.of(D.FLOAT16, 5, 7, 7, 1, (3,), (35,))
    queue_all(prepare_epilogue(Epilogue(D.FLOAT32, 7, out), 0), Addresses(product=64, out=128), 1)
    packed, epilogue = core.launched
    assert packed[2] == "pack_groups"
    assert packed[5:7] == epilogue[9:11] == (1, 105)  # after four factors


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


@pytest.mark.parametrize("damage", ["cut", "empty", "flipped", "refused by the driver"])
def test_a_kernel_that_cannot_be_used_is_compiled_again(damage, core, cache):
    code = kernel(A=1).code
    (path,) = files(cache)
    data, old = path.read_bytes(), code + b"old"
    core.refuses = (old,)
    refused = compiling.hashlib.sha256(old).digest() + old
    path.write_bytes(
        {"cut": data[:-1], "empty": b"", "flipped": data[:-1] + b"?"}.get(damage, refused)
    )
    forget()
    with pytest.warns(
        LowprecWarning,
        match="epilogue_sm_90.*(it is damaged|CUDA_ERROR_INVALID.*); it is written again",
    ):
        assert kernel(A=1).code == code
    assert len(core.compiled) == 2
    assert files(cache) == [path]
    assert path.read_bytes() == data


def test_new_code_that_the_driver_refuses_is_an_error_and_is_not_kept(core, cache):
    code = kernel(A=1).code
    (path,) = files(cache)
    path.unlink()
    core.refuses = (code,)
    forget()
    with pytest.raises(
        BackendError, match=r"cannot load kernel epilogue for sm_90: CUDA_ERROR_INVALID"
    ):
        kernel(A=1)
    assert files(cache) == []
