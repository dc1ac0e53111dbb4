"""Classes are found by name; an unknown name gets a suggestion."""

import sys

import pytest

from headstock.errors import UserError
from headstock.model.backbone import BACKBONES
from headstock.registry import Registry
from headstock.tasks.base import TASKS


def test_registered_classes_are_found():
    assert "transformer" in BACKBONES.names()
    assert TASKS.get("causal").name == "causal"


def test_a_wrong_name_gets_a_hint():
    with pytest.raises(UserError, match="unknown model family 'transfomer'; did you mean 'transformer'"):
        BACKBONES.get("transfomer")


def test_a_new_module_is_found(tmp_path, monkeypatch):
    (tmp_path / "zoo").mkdir()
    (tmp_path / "zoo" / "__init__.py").write_text("")
    (tmp_path / "zoo" / "cat.py").write_text("import zoo_registry\n@zoo_registry.ZOO.add('cat')\nclass Cat: pass\n")
    (tmp_path / "zoo_registry.py").write_text(
        "from headstock.registry import Registry\nZOO = Registry('animal', 'zoo')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    import zoo_registry  # type: ignore[import-not-found]

    assert zoo_registry.ZOO.names() == ["cat"]
    assert zoo_registry.ZOO.get("cat").__name__ == "Cat"
    for name in ("zoo", "zoo.cat", "zoo_registry"):
        sys.modules.pop(name, None)


def test_duplicate_names_are_refused():
    registry: Registry = Registry("thing", "headstock.tasks")
    registry.add("a")(type("A", (), {}))
    with pytest.raises(ValueError, match="registered as 'a'"):
        registry.add("a")(type("B", (), {}))
