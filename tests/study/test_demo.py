"""The demo fits the time there is, says where it did not win, and touches no folder that is not its own."""

import pytest

from headstock.errors import UserError
from headstock.study.demo import SIZES, Size, clear, fitting, honest


def test_more_time_or_speed_compares_more():
    def chosen(speed, seconds):
        return SIZES.index(fitting({"tokens_per_second": speed}, seconds=seconds))

    by_time = [chosen(10_000, minutes * 60) for minutes in (0.1, 3, 5, 10, 30, 120, 600)]
    by_speed = [chosen(speed, 280) for speed in (1_000, 5_000, 10_000, 50_000, 1_000_000)]
    for places in (by_time, by_speed):
        assert places == sorted(places)
        assert places[0] == 0 and places[-1] == len(SIZES) - 1
    assert [size.work() for size in SIZES] == sorted(size.work() for size in SIZES)


def test_every_size_has_two_smaller_counts_and_enough_seeds_for_an_interval():
    assert all(len(size.labels) >= 2 and size.seeds >= 3 for size in SIZES)
    assert Size((100,), 3, 10).work() < Size((100, 200), 3, 10).work() < Size((100, 200), 4, 10).work()


def test_where_it_is_not_clearly_better_it_says_so():
    def pair(a, b, low, high):
        return {"a": a, "b": b, "labels": 100, "difference": (low + high) / 2, "low": low, "high": high}

    won = [pair("scratch", "pretrained", -0.2, -0.1), pair("pretrained", "tfidf", 0.01, 0.1)]
    assert honest({"pairs": won}).strip().startswith("The pretrained model is clearly better than scratch and TF-IDF")
    lost = [pair("scratch", "pretrained", -0.2, 0.01), pair("pretrained", "tfidf", 0.0004, 0.1)]
    said = honest({"pairs": lost}).strip()
    assert said == "The pretrained model is not clearly better than scratch at 100 labels, TF-IDF at 100 labels."


def test_a_folder_of_something_else_is_left_alone(tmp_path):
    mine = tmp_path / "mine"
    mine.mkdir()
    clear(mine, overwrite=True, say=print)  # empty: it may be used
    (mine / "thesis.txt").write_text("years of work")
    for overwrite in (False, True):
        with pytest.raises(UserError, match="holds something else"):
            clear(mine, overwrite=overwrite, say=print)
    assert (mine / "thesis.txt").read_text() == "years of work"


def test_a_demo_goes_on_unless_it_is_to_begin_anew(tmp_path):
    said = []
    (tmp_path / "demo" / "live").mkdir(parents=True)
    clear(tmp_path / "demo", overwrite=False, say=said.append)
    assert (tmp_path / "demo" / "live").is_dir() and "--overwrite begins anew" in said[0]
    (tmp_path / "demo" / "runs").mkdir()
    (tmp_path / "demo" / "runs" / "notes.txt").write_text("years of work")
    with pytest.raises(UserError, match="notes"):
        clear(tmp_path / "demo", overwrite=True, say=said.append)
    assert (tmp_path / "demo" / "live").is_dir()
    (tmp_path / "demo" / "runs" / "notes.txt").unlink()
    clear(tmp_path / "demo", overwrite=True, say=said.append)
    assert not (tmp_path / "demo").exists()
