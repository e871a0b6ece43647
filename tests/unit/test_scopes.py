"""``math_mode`` and ``fp32_guard`` as blocks, decorators and wrappers, over threads and tasks."""

import asyncio
import contextlib
import contextvars
import functools
import inspect
import multiprocessing
import pickle
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import pytest

from lowprec.errors import LowprecWarning, ModeError
from lowprec.modes import MathMode
from lowprec.policy import emulate, entries, fp32_guard, get_math_mode, math_mode, set_math_mode
from support.programs import run_python

FP32, PEDANTIC = MathMode.FP32, MathMode.FP32_PEDANTIC
TF32, BF16, FP16 = MathMode.TF32, MathMode.BF16, MathMode.FP16
#: Outside of all scopes.
OUTSIDE = FP16

#: By scope: how it is made, and the mode in it.
SCOPES = {"mode": (lambda: math_mode("bf16"), BF16), "guard": (fp32_guard, FP32)}
scopes = pytest.mark.parametrize(("make", "inside"), SCOPES.values(), ids=SCOPES)


@pytest.fixture(autouse=True)
def outside(clean_policy):
    """A process that lowers the precision; it is as before after each test."""
    set_math_mode(OUTSIDE)
    yield
    assert get_math_mode() is OUTSIDE


def test_arguments_are_checked_at_construction():
    for wrong in ("fp23", None, inspect):
        with pytest.raises(ModeError, match="is not a math mode"):
            math_mode(wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"math_mode\('bf16'\) decorates functions, got int"):
        math_mode("bf16")(3)  # type: ignore[type-var]
    with pytest.raises(TypeError, match=r'write @math_mode\("bf16"\)'):
        math_mode(get_math_mode)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"write @fp32_guard\(\)"):
        fp32_guard(get_math_mode)  # type: ignore[arg-type]


@scopes
def test_blocks_nest_and_are_entered_again(make, inside):
    scope, tf32 = make(), math_mode("tf32")
    with tf32:
        with scope:
            with tf32, scope, make():
                assert get_math_mode() is inside
            assert get_math_mode() is inside
        assert get_math_mode() is TF32
        with scope:
            assert get_math_mode() is inside
        assert get_math_mode() is TF32


@scopes
def test_blocks_that_end_out_of_order_do_not_undo_each_other(make, inside):
    tf32, scope = math_mode("tf32"), make()
    tf32.__enter__()
    scope.__enter__()
    tf32.__exit__(None, None, None)
    assert get_math_mode() is inside
    scope.__exit__(None, None, None)
    assert get_math_mode() is OUTSIDE
    scope.__enter__()
    tf32.__enter__()
    scope.__exit__(None, None, None)
    assert get_math_mode() is TF32
    tf32.__exit__(None, None, None)


@scopes
def test_an_exit_in_another_context_ends_the_block(make, inside):
    for make_context in (contextvars.Context, contextvars.copy_context):
        scope = make().__enter__()
        leave = functools.partial(make_context().run, scope.__exit__, None, None, None)
        if make_context is contextvars.Context:
            with pytest.warns(
                LowprecWarning, match=r"\(.*\) was left in another thread or task than"
            ):
                leave()
        else:
            leave()
        assert get_math_mode() is OUTSIDE
        with scope:
            assert get_math_mode() is inside


@scopes
def test_copies_of_a_context_that_outlive_the_block(make, inside):
    """As of tasks, and of threads that inherit the context."""
    outer, inner = math_mode("bf16x3"), make()
    seen = []

    def look():
        seen.append(get_math_mode())

    with outer:
        with inner:
            innermost = contextvars.copy_context()
            innermost.run(look)
            nested = math_mode("tf32")
            innermost.run(nested.__enter__)
        middle = contextvars.copy_context()
        innermost.run(look)
        middle.run(look)
    innermost.run(nested.__exit__, None, None, None)
    for context in (innermost, middle):
        context.run(look)
        with outer:
            context.run(look)
        with ThreadPoolExecutor(1) as pool:
            pool.submit(context.run, look).result()
    assert seen == [inside, TF32, MathMode.BF16X3] + [OUTSIDE] * 6


@scopes
def test_blocks_that_end_out_of_order_for_ever_leave_no_entries(make, inside):
    """The first one of a pair ends first, so that the second one's entry has an ended one outside of it."""
    before = entries.current.get()
    for _ in range(3):
        first, second = make(), make()
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        second.__exit__(None, None, None)
    assert entries.current.get() is before
    assert first._open == second._open == {}


def test_thousands_of_blocks_that_were_not_left():
    """As those of scopes with a name, whose ``__exit__`` an interrupt has prevented."""
    outer, named = math_mode("tf32").__enter__(), fp32_guard()
    for _ in range(1500):
        named.__enter__()
    outer.__exit__(None, None, None)
    assert get_math_mode() is FP32
    for _ in range(1500):
        named.__exit__(None, None, None)


@pytest.mark.parametrize("make", [math_mode, fp32_guard, emulate], ids=lambda make: make.__name__)
def test_a_scope_that_is_not_used_warns_with_its_line(make, recwarn):
    argument = {math_mode: "bf16", fp32_guard: True, emulate: "volta"}[make]
    line = inspect.currentframe().f_lineno + 1
    scope = make(argument)
    assert not recwarn.list
    del scope
    (warning,) = recwarn.list
    assert (warning.category, warning.filename, warning.lineno) == (LowprecWarning, __file__, line)
    assert str(warning.message).startswith(
        "the scope was made and not used, so it had no effect; open it by 'with'"
    )
    with make(argument), contextlib.ExitStack() as stack:
        stack.enter_context(make(argument))
        make(argument)(plain)
        make(argument).wrap(plain)
        with pytest.raises((TypeError, ValueError), match="no_such"):
            make(no_such=1)
        pickle.loads(pickle.dumps(make(argument))).__enter__().__exit__(None, None, None)
    assert recwarn.list == [warning]


def test_no_warning_at_the_end_of_the_interpreter():
    program = """
        import lowprec
        unused, entered = lowprec.fp32_guard(), lowprec.math_mode("bf16").__enter__()
        lowprec.cycle = [lowprec.emulate("volta")]
        lowprec.cycle.append(lowprec.cycle)
        print("end")
    """
    assert run_python(program) == "end"


@scopes
def test_a_scope_that_is_collected_while_it_is_open_has_ended(make, inside):
    with pytest.warns(
        LowprecWarning, match="the scope was collected without being left, and has ended"
    ):
        make().__enter__()
    assert get_math_mode() is OUTSIDE


def test_the_process_default_reaches_every_thread():
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(get_math_mode).result() is OUTSIDE
        set_math_mode("highest")
        assert pool.submit(get_math_mode).result() is FP32
    with pytest.raises(ModeError, match="'fp23' is not a math mode"):
        set_math_mode("fp23")
    assert get_math_mode() is FP32
    set_math_mode(OUTSIDE)


def test_tasks_overlap_without_leaking():
    shared, guard = math_mode("bf16"), fp32_guard()

    async def look(turns):
        seen = []
        for _ in range(turns):
            await asyncio.sleep(0)
            seen.append(get_math_mode())
        return seen

    async def work(scope, turns):
        with shared, scope:
            seen = await look(turns)
        return [*seen, get_math_mode()]

    async def main():
        working = (work(math_mode("tf32"), 3), work(guard, 1), work(guard, 2))
        return await asyncio.gather(*working, look(4), guard(look)(2))

    assert asyncio.run(main()) == [
        [TF32] * 3 + [OUTSIDE], [FP32, OUTSIDE], [FP32] * 2 + [OUTSIDE], [OUTSIDE] * 4, [FP32] * 2,
    ]  # fmt: skip


@scopes
def test_a_decorated_function(make, inside):
    @make()
    def mode(depth, *, fail=False):
        """Return the mode at each depth."""
        if fail:
            raise ZeroDivisionError("on purpose")
        return [get_math_mode(), *(mode(depth - 1) if depth else [])]

    assert (mode.__name__, mode.__doc__) == ("mode", "Return the mode at each depth.")
    assert mode(2) == [inside] * 3
    with pytest.raises(ZeroDivisionError, match="on purpose"):
        mode(0, fail=True)


def test_generator_functions_are_not_decorated():
    def steps():
        yield 1

    async def later():
        yield 1

    class Steps:
        def __call__(self):
            yield 1

        @staticmethod
        def static():
            yield 1

    targets = [
        steps,
        later,
        functools.partial(later),
        Steps(),
        functools.partial(Steps()),
        vars(Steps)["static"],
    ]
    for target in targets:
        for decorate in (math_mode("bf16"), math_mode("bf16").wrap, fp32_guard()):
            text = r"(math_mode\('bf16'\)|fp32_guard\(\)) does not decorate generator .* 'with \1:' in the body"
            with pytest.raises(TypeError, match=text):
                decorate(target)


def test_a_decorated_object_with_a_coroutine_function():
    class Coroutine:
        async def __call__(self):
            await asyncio.sleep(0)
            return get_math_mode()

    for wrap in (lambda f: f, functools.partial):
        assert asyncio.run(math_mode("bf16")(wrap(Coroutine()))()) is BF16


def test_decorated_methods_without_an_instance():
    class Solver:
        @math_mode("bf16")
        @staticmethod
        def static(x):
            return x, get_math_mode()

        @math_mode("bf16")
        @staticmethod
        async def later(x):
            await asyncio.sleep(0)
            return x, get_math_mode()

    for solver in (Solver, Solver()):
        assert solver.static(3) == (3, BF16)
        assert asyncio.run(solver.later(3)) == (3, BF16)


def plain(offset=0):
    return get_math_mode(), offset


@pytest.mark.parametrize(
    ("scope", "mode"), [(math_mode("tf32"), MathMode.TF32), (fp32_guard(), MathMode.FP32)]
)
def test_a_wrapped_function_reaches_another_process(scope, mode, monkeypatch):
    # The other process imports this module by its name, from the root of the tests.
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[__name__.count(".")]))
    wrapped = scope.wrap(plain)
    assert inspect.signature(wrapped) == inspect.signature(plain)
    assert pickle.loads(pickle.dumps(wrapped))(3) == (mode, 3)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        assert pool.submit(wrapped, offset=2).result(60) == (mode, 2)


def test_a_wrapped_function_without_a_name_is_not_pickled():
    with pytest.raises((pickle.PicklingError, AttributeError), match="lambda"):
        pickle.dumps(math_mode("bf16").wrap(lambda: None))
