"""How a run stops early: all ranks after the same step, whoever heard the signal, and without waiting for a round.

    a signal ──► one rank's `ask` ──► (the step's own reduction) ──► its group's first rank ──► the store: "asked"
    every group's first rank, in a thread: sees "asked", reports the step it is in, and begins no later one before all
    have reported; then all know  after = the highest step reported + 1,  and tell their group in the step's reduction

A step's last reduction is in any case; two more numbers in it cost nothing, and between groups nothing is sent until
somebody asks. The highest plus one: a rank may be in the step after its first rank's, but in no later one.
"""

from __future__ import annotations

import multiprocessing
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.distributed_c10d import _get_default_store

from fedshard.engine.world import World

LOOK_SECONDS = 0.2
"""How often a group's first rank looks whether another group was asked to stop."""


class Stop:
    """When a run stops, as one rank knows it; `after` is None as long as nobody asked.

    >>> stop = Stop(after=3)
    >>> stop.before(3), stop.before(4)
    (False, True)
    """

    def __init__(self, after: int | None = None, groups: int = 1, board: Board | None = None):
        """`board`: how the first ranks of several groups agree; other ranks hear of it from them."""
        self.after = after
        self.asked = False
        """Whether this rank was asked to stop."""
        self._groups, self._board = groups, board

    def ask(self, *_: object) -> None:
        """Stop soon; what a signal's handler calls."""
        self.asked = True

    def before(self, step: int) -> bool:
        """Whether training ends before this step begins. All ranks of all groups end before the same one."""
        if self._board is not None:
            self._no_later_than(self._board.begin(step))
        return self.after is not None and step > self.after

    def words(self) -> list[float]:
        """What this rank says in the step's reduction, which adds up the group's: asked, and after which step."""
        known = self.after if self._board is not None else None
        return [float(self.asked), float(known or 0)]

    def hear(self, step: int, asked: float, after: float) -> None:
        """What all ranks of the group said in the reduction of this step."""
        if after:
            self._no_later_than(int(after))
        elif asked and self._groups == 1:
            self._no_later_than(step)
        elif asked and self._board is not None:
            self._board.ask()

    def close(self) -> None:
        """The run is over."""
        if self._board is not None:
            self._board.close()

    def _no_later_than(self, step: int | None) -> None:
        if step is not None:
            self.after = step if self.after is None else min(self.after, step)


class Board:
    """Where the first ranks of groups agree on the step to stop after: a part of the store that all ranks met at."""

    def __init__(self, store: Store, group: int, groups: int):
        self._store = store  # both threads use it: no call waits for what is not there yet
        self._reports = [f"present/{each}" for each in range(groups)]
        self._own = self._reports[group]
        self._present, self._after = 0, None
        self._reported, self._closed = False, False
        self._changed = threading.Condition()
        threading.Thread(target=self._watch, name="stop", daemon=True).start()

    def ask(self) -> None:
        """This group was asked to stop."""
        self._store.set("asked", "1")

    def begin(self, step: int) -> int | None:
        """This group is about to begin a step. After which one all stop, if that is agreed; waits while it is being."""
        with self._changed:
            self._changed.wait_for(lambda: not self._reported or self._after is not None or self._closed)
            self._present = step
            return self._after

    def close(self) -> None:
        """No more steps."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _watch(self) -> None:
        """The thread: see that someone asked, report, and learn what all reported."""
        try:
            if self._appears(["asked"]):
                with self._changed:
                    self._reported = True
                    self._store.set(self._own, str(self._present))
                if self._appears(self._reports):
                    after = max(int(each) for each in self._store.multi_get(self._reports)) + 1
                    with self._changed:
                        self._after = after
        except dist.DistError:  # rank 0 is gone: the run ends, or fails, without us
            pass
        finally:
            self.close() if self._after is None else self._notify()

    def _appears(self, keys: list[str]) -> bool:
        """Wait until all keys are there; False if the run is over before."""
        while not self._store.check(keys):
            with self._changed:
                if self._changed.wait_for(lambda: self._closed, LOOK_SECONDS):
                    return False
        return True

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()


def open_stop(world: World, after: int | None) -> Stop:
    """How this run's ranks agree to stop; all ranks call it together."""
    groups = world.layout.groups
    if groups == 1:
        return Stop(after)
    met = _get_default_store()
    number = [met.add("stops", 1) if world.rank == 0 else 0]  # of this run, among those of these processes
    dist.broadcast_object_list(number, src=0, group=world.control)
    if world.rank % world.layout.group_ranks != 0:
        return Stop(after, groups)
    store = PrefixStore(f"stop-{number[0]}", met)
    return Stop(after, groups, Board(store, world.place.group, groups))


@contextmanager
def heeding_signals(stop: Stop) -> Iterator[None]:
    """SIGUSR1 asks to stop, and SIGTERM too unless this rank was started by our launcher, which sends SIGTERM to the
    others when a rank fails."""
    numbers = [signal.SIGUSR1] if multiprocessing.parent_process() else [signal.SIGUSR1, signal.SIGTERM]
    before = {number: signal.signal(number, stop.ask) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
