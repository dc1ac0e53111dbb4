"""Which of the processes that torchrun started this one is, by the environment alone."""

import os

# what torch.distributed needs to meet; a scheduler or a shell may have set one of them for something else
TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def rank_and_size() -> tuple[int, int]:
    """This process's rank and how many there are; (0, 1) unless the whole environment of torchrun is set."""
    rank, size, *_ = (os.environ.get(name, "") for name in TORCHRUN)
    if not all(os.environ.get(name) for name in TORCHRUN) or not (rank.isdecimal() and size.isdecimal()):
        return 0, 1
    return int(rank), max(1, int(size))
