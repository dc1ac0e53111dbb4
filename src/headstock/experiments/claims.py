"""Work that several processes share: each piece is made by one of them, and all of them have everything in the end.

Whoever starts the same command twice, on two GPUs say, has it done in half the time.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from headstock.io import try_lock

Piece = TypeVar("Piece")
Made = TypeVar("Made")
PAUSE = 0.5  # seconds before it is looked again what others have done


def share(
    folder: Path,
    pieces: Sequence[Piece],
    name: Callable[[Piece], str],
    make: Callable[[Piece], Made],
    say: Callable[[str], None],
) -> Iterator[tuple[int, Made]]:
    """What is made of every piece and its place among them, in the order in which they come to be known.

    `make` finds what is there already. A piece that another process is at work on is left until the others are done.
    """
    left, waiting = list(range(len(pieces))), False
    while left:
        before = len(left)
        for place in list(left):
            with try_lock(claim(folder, name(pieces[place]))) as mine:
                if not mine:
                    continue
                made = make(pieces[place])
            left.remove(place)
            yield place, made
        if len(left) == before:
            if not waiting:
                say(f"waiting for other processes, which are at work on {len(left)} more")
            waiting = True
            time.sleep(PAUSE)


@contextmanager
def alone(folder: Path, name: str) -> Iterator[None]:
    """The others wait until it is done."""
    while True:
        with try_lock(claim(folder, name)) as mine:
            if mine:
                yield
                return
        time.sleep(PAUSE)


def claim(folder: Path, name: str) -> Path:
    """An empty file, which stays: a claim to one that was removed would be no claim to the next of its name."""
    return folder / "claims" / name
