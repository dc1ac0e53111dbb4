"""The demo fits the available time, reports where pretraining does not help, and leaves other folders alone."""

import pytest

from headstock.errors import UserError
from headstock.experiments import demo
from headstock.experiments.demo import SIZES, check_output_folder, largest_fitting, summarize_pretrained


def seconds_of(size, seconds_per_row):
    """An approximate cost of a size, sufficient to order them."""
    return (
        seconds_per_row * size.seeds * sum(6 * max(n, 16 * size.least_steps) + (size.rows or 2539) for n in size.labels)
    )


def test_more_time_or_speed_allows_a_larger_comparison():
    def size_index(seconds_per_row, seconds):
        estimates = [(size, seconds_of(size, seconds_per_row)) for size in SIZES]
        return SIZES.index(largest_fitting(estimates, seconds=seconds)[0])

    by_time = [size_index(0.01, minutes * 60) for minutes in (0.1, 3, 5, 10, 30, 120, 6000)]
    by_speed = [size_index(seconds_per_row, 280) for seconds_per_row in (1.0, 0.02, 0.01, 0.001, 0.00001)]
    for indices in (by_time, by_speed):
        assert indices == sorted(indices)
        assert indices[0] == 0 and indices[-1] == len(SIZES) - 1
        assert len(set(indices)) > 2


def test_sizes_are_ordered_by_cost_and_have_enough_seeds():
    assert [seconds_of(size, 1) for size in SIZES] == sorted(seconds_of(size, 1) for size in SIZES)
    assert all(len(size.labels) >= 2 and size.seeds >= 3 for size in SIZES)


def test_the_estimated_time_is_logged_and_a_resumed_demo_keeps_its_size(tmp_path, monkeypatch, caplog):
    estimates = [(size, 60.0 * index) for index, size in enumerate(SIZES)]
    monkeypatch.setattr(demo, "estimate_sizes", lambda out, **options: estimates)
    caplog.set_level("INFO", logger="headstock")
    first = demo.choose_size(tmp_path, minutes=4.0, device="cpu", seed=0)
    assert first is SIZES[3] and "minutes" in caplog.messages[0]
    slower = [(size, 10 * seconds) for size, seconds in estimates]
    monkeypatch.setattr(demo, "estimate_sizes", lambda out, **options: slower)
    assert demo.choose_size(tmp_path, minutes=4.0, device="cpu", seed=0) is first  # although the machine is slower now
    assert demo.choose_size(tmp_path, minutes=2.0, device="cpu", seed=0) is SIZES[0]  # other minutes
    demo.check_output_folder(tmp_path, overwrite=False)  # a folder with only a plan is a demo


def test_rivals_that_are_not_clearly_beaten_are_named():
    def pair(a, b, low, high):
        return {"a": a, "b": b, "labels": 100, "difference": (low + high) / 2, "low": low, "high": high}

    clear = [pair("scratch", "pretrained", -0.2, -0.1), pair("pretrained", "tfidf", 0.01, 0.1)]
    assert "is clearly better than scratch and TF-IDF" in summarize_pretrained({"pairs": clear})
    unclear = [pair("scratch", "pretrained", -0.2, 0.01), pair("pretrained", "tfidf", 0.0004, 0.1)]
    summary = summarize_pretrained({"pairs": unclear})
    assert "not clearly better than scratch at 100 labels, TF-IDF at 100 labels" in summary


def test_a_folder_that_is_not_a_demo_is_refused(tmp_path):
    mine = tmp_path / "mine"
    mine.mkdir()
    check_output_folder(mine, overwrite=True)  # an empty folder may be used
    (mine / "thesis.txt").write_text("years of work")
    for overwrite in (False, True):
        with pytest.raises(UserError, match="not a demo"):
            check_output_folder(mine, overwrite=overwrite)
    assert (mine / "thesis.txt").read_text() == "years of work"


def test_a_demo_continues_unless_it_is_to_be_overwritten(tmp_path, caplog):
    caplog.set_level("INFO", logger="headstock")
    (tmp_path / "demo" / "live").mkdir(parents=True)
    check_output_folder(tmp_path / "demo", overwrite=False)
    assert (tmp_path / "demo" / "live").is_dir() and "--overwrite" in caplog.messages[0]
    (tmp_path / "demo" / "runs").mkdir()
    (tmp_path / "demo" / "runs" / "notes.txt").write_text("years of work")
    with pytest.raises(UserError, match="notes"):
        check_output_folder(tmp_path / "demo", overwrite=True)
    assert (tmp_path / "demo" / "live").is_dir()
    (tmp_path / "demo" / "runs" / "notes.txt").unlink()
    check_output_folder(tmp_path / "demo", overwrite=True)
    assert not (tmp_path / "demo").exists()
