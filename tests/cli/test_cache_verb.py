"""`headstock cache`: what it lists, removes and refuses."""

import pytest


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADSTOCK_CACHE", str(tmp_path))
    folder = tmp_path / "stores" / ("ab" * 32)
    folder.mkdir(parents=True)
    (folder / "train-00000.bin").write_bytes(bytes(2_000_000))
    (tmp_path / "stores" / "notes").mkdir()
    return folder


def test_list(call, result, store):
    out, _ = call("cache", "list")
    assert "2.0 MB" in out and "1 not ours" in out and "tokenized corpora" in out
    entries = result("cache", "list")["entries"]
    assert [(entry["kind"], entry["bytes"], entry["is_ours"]) for entry in entries] == [
        ("stores", 2_000_000, True),
        ("stores", 0, False),
    ]


def test_clear(call, result, store):
    assert not result("cache", "clear", "--older-than", 1)["removed"]
    out, err = call("cache", "clear", "stores", "--dry-run")
    assert "would remove" in out and "not written by Headstock" in err and store.exists()
    answer = result("cache", "clear", "stores")
    assert answer["bytes"] == 2_000_000 and [entry["path"] for entry in answer["removed"]] == [str(store)]
    assert not store.exists() and (store.parent / "notes").exists()


def test_an_unknown_kind(refused, store):
    assert "did you mean 'stores'" in refused("cache", "clear", "store")
