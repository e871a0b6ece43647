"""The thread that lets go of operands: it looks until there is nothing left, and may be left behind anywhere."""

import os
import threading
import time

import pytest

from lowprec.backends.cuda.waiting import Waiter
from support import interrupts
from support.programs import start

#: Nothing here takes a second; only a failure takes this long.
LONG_S = 60


class Work:
    """Something that is done at the third look; then an event is set."""

    def __init__(self):
        self.looks = 0
        self.done = threading.Event()
        self.threads: set[int] = set()

    def look(self):
        self.looks += 1
        self.threads.add(threading.get_ident())
        if self.looks % 3:
            return True
        self.done.set()
        return False


@pytest.fixture
def stopped():
    """Makes waiters, which are stopped at the end."""
    made = []

    def make(look):
        made.append(Waiter(look))
        return made[-1]

    yield make
    for waiter in made:
        waiter.stop()


def test_it_looks_until_there_is_nothing_left(stopped):
    work = Work()
    waiter = stopped(work.look)
    assert work.looks == 0
    for count in (3, 6):
        waiter.wake()
        assert work.done.wait(LONG_S)
        assert work.looks == count
        work.done.clear()
    assert len(work.threads) == 1
    assert threading.get_ident() not in work.threads


def test_an_error_ends_one_look_and_not_the_thread(stopped):
    came, again = threading.Event(), threading.Event()

    def look():
        if not came.is_set():
            came.set()
            raise RuntimeError("the device is lost")
        again.set()
        return False

    waiter = stopped(look)
    waiter.wake()
    assert came.wait(LONG_S)
    waiter.wake()
    assert again.wait(LONG_S)


def test_a_stopped_one_looks_no_more(stopped):
    inside, leave = threading.Event(), threading.Event()
    looks = []

    def look():
        looks.append(1)
        inside.set()
        assert leave.wait(LONG_S)
        return True

    waiter = stopped(look)
    waiter.wake()
    assert inside.wait(LONG_S)
    stopping = threading.Thread(target=waiter.stop)
    stopping.start()
    assert stopping.is_alive()  # a look that has begun is waited for
    leave.set()
    stopping.join(LONG_S)
    waiter.wake()
    time.sleep(0.02)  # four times the longest pause between two looks
    assert looks == [1]


def test_an_interrupt_anywhere_leaves_one_that_works(stopped):
    made = []

    def start_one():
        work = Work()
        made.append((work, stopped(work.look)))
        made[-1][1].wake()

    for _ in interrupts.interrupted(start_one):
        for work, waiter in made[-1:]:
            waiter.wake()
            assert work.done.wait(LONG_S)
    assert len(made) >= 5


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_child_starts_its_own():
    """The parent's thread is in the midst of a look, with the lock, when the process is forked."""
    code = """
import os, threading
from lowprec.backends.cuda.waiting import Waiter
inside, leave, parent = threading.Event(), threading.Event(), os.getpid()
def look():
    inside.set()
    if os.getpid() == parent:
        leave.wait()
    return False
waiter = Waiter(look)
waiter.wake()
inside.wait()
child = os.fork()
if not child:
    inside = threading.Event()
    waiter.wake()
    waited = inside.wait(60)
    waiter.stop()
    os._exit(0 if waited else 1)
_, status = os.waitpid(child, 0)
print(os.waitstatus_to_exitcode(status))
leave.set()
waiter.stop()
"""
    assert start("-W", "ignore", "-c", code) == (0, "0\n", "")
