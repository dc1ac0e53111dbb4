"""What all tests share: a cache of their own, a small text that can be learned, and a browser."""

import gc
import os
import random
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"  # read when torch and numpy are imported

os.environ["MIMALLOC_ARENA_RESERVE"] = "0"  # a limit on address space is a limit on memory, with torch's allocator, too

import hypothesis
import pytest
import torch

from tests import forks
from tests.commands import COMMANDS, WORKERS, preload, save_time

pytest_plugins = ["tests.comparisons", "tests.servers"]
save_time()
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts background jobs with it ignored
torch.set_num_threads(1)  # test models are so small that a second thread only gets in the way
hypothesis.settings.register_profile("headstock", deadline=None, max_examples=50)  # a busy machine is no failure
hypothesis.settings.load_profile("headstock")


# Files of more than ten seconds, wherever they are, and then directories; the slowest first
SLOW_FILES = [
    "test_ray",
    "test_kill",
    "test_onnx",
    "test_finetune",
    "test_notebooks",
    "test_compare_page",
    "test_distributed_faults",
    "test_task_pages",
    "test_page",
    "test_trackers",
    "test_fsdp",
    "test_sweep_search",
    "test_pages",
    "test_finetune_verbs",
    "test_sklearn",
    "test_export",
    "test_beam_search",
    "test_diagram",
    "test_doctor_verb",
    "test_mirror",
    "test_answer_runs",
    "test_compare",
    "test_sweep",
    "test_objectives",
    "test_resume",
    "test_execution",
    "test_recurrent_runs",
    "test_regress",
    "test_baseline_families",
    "test_planner",
    "test_disk",
    "test_translation_runs",
    "test_server",
    "test_signals",
    "test_bombs",
    "test_remote",
    "test_toy_backbone",
    "test_fuzz",
    "test_compare_tasks",
    "test_lora_runs",
    "test_state",
    "test_probe",
    "test_toy_task",
    "test_wheel",
    "test_distributed",
    "test_layer_walkthrough",
    "test_typing",
    "test_compare_cache",
    "test_rank_parity",
    "test_schemathesis",
    "test_ablated_runs",
    "test_reference",
]
SLOW_FIRST = ("faults", "report", "experiments", "train", "interop", "toys", "cli", "serve", "explain")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(specs):
    """Fork the workers, so that what they import and compute first is loaded once for all."""
    import execnet

    preload(f"{COMMANDS} {WORKERS}")
    forks.start_server()
    python = f"{sys.executable} {forks.__file__}"
    specs[:] = [execnet.XSpec(f"{spec}//id={spec.id}//python={python}") for spec in specs]


def pytest_unconfigure():
    forks.stop_server()


def pytest_collection_modifyitems(items):
    """Start with the slow files, so that parallel workers end at the same time."""
    rank = {name: number for number, name in enumerate([*SLOW_FILES, *SLOW_FIRST])}
    last = len(rank)
    items.sort(key=lambda item: min(rank.get(name, last) for name in (item.path.stem, item.path.parent.name)))


def pytest_collection_finish(session):
    """Leave the modules that are loaded by now out of garbage collections, which take 4% of the time with them."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory):
    """No test reads or writes the user's cache; programs that tests start inherit it."""
    os.environ["HEADSTOCK_CACHE"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(autouse=True)
def keep_onednn():
    """PyTorch turns oneDNN off, for all later tests too, at a product in bfloat16 that the CPU does not support."""
    yield
    torch.backends.mkldnn.set_flags(True)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    """Three hundred short documents with some order in them: enough to learn from in a second."""
    pick = random.Random(0)
    who, what, where = ["Anne", "Ben", "le café", "Zoë"], ["sees", "likes", "finds"], ["home", "the sea", "Paris"]
    documents = []
    for number in range(300):
        lines = [f"{pick.choice(who)} {pick.choice(what)} {pick.choice(where)}." for _ in range(pick.randint(1, 4))]
        documents.append("\n".join([f"Story {number}", *lines]))
    path = tmp_path_factory.mktemp("text") / "stories.txt"
    path.write_text("\n\n".join(documents), encoding="utf-8")
    return path


TINY = {
    "depth": 2,
    "width": 16,
    "heads": 2,
    "hidden": 32,
    "context": 32,
    "vocabulary": 300,
    "batch": 8,
    "steps": 12,
    "validate_every": 6,
    "tensorboard": False,
}


@pytest.fixture
def tiny() -> dict:
    """Settings of a model that trains in about a second."""
    return dict(TINY)


@pytest.fixture
def messages() -> Iterator[list[str]]:
    """The log messages of the package, in order."""
    from headstock.logs import messages_to

    lines: list[str] = []
    with messages_to(lines.append):
        yield lines


@pytest.fixture
def call(capsys, monkeypatch):
    """The command line in this process, without the seconds that one of its own takes to start: stdout and stderr."""
    from headstock.cli.app import main

    def call(*words, code: int = 0) -> tuple[str, str]:
        monkeypatch.setattr(sys, "argv", ["headstock", *map(str, words)])
        with pytest.raises(SystemExit) as left:
            main()
        out, err = capsys.readouterr()
        assert left.value.code == code, err
        return out, err

    return call


BROWSER_FLAGS = ["--no-sandbox", "--disable-gpu", "--in-process-gpu"]
# Playwright disables the first ones, too; the others load pages of the browser's own for every window and renderer
NO_FEATURES = "HttpsUpgrades,MediaRouter,OptimizationHints,PaintHolding,RenderDocument,Translate,"
NO_FEATURES += "SpareRendererForSitePerProcess,WebUIOmniboxAimPopup,WebUIOmniboxFullPopup,WebUIOmniboxPopup"


@pytest.fixture(scope="module")
def browser():
    """Closed after each file: while it is open, its event loop runs, and a test cannot call asyncio.run."""
    api = pytest.importorskip("playwright.sync_api")
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        pytest.skip("there is no Chromium here")
    with api.sync_playwright() as play:
        opened = play.chromium.launch(executable_path=found, args=[*BROWSER_FLAGS, f"--disable-features={NO_FEATURES}"])
        yield opened
        opened.close()
