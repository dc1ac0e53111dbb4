"""Names for things: a folder of modules, each of which registers what it defines."""

import importlib
import pkgutil
from collections.abc import Callable
from typing import Generic, TypeVar

from headstock.errors import UserError, did_you_mean

Kind = TypeVar("Kind", bound=type)


class Registry(Generic[Kind]):
    """Maps names to the classes found in one package; a new one is one new file there."""

    def __init__(self, what: str, package: str):
        self.what, self.package = what, package
        self._found: dict[str, Kind] = {}
        self._loaded = False

    def add(self, name: str) -> Callable[[Kind], Kind]:
        def keep(cls: Kind) -> Kind:
            if name in self._found:
                raise ValueError(f"two {self.what}s are both called {name!r}")
            self._found[name] = cls
            cls.name = name  # type: ignore[attr-defined]
            return cls

        return keep

    def names(self) -> list[str]:
        if not self._loaded:
            home = importlib.import_module(self.package)
            for module in pkgutil.iter_modules(home.__path__):
                importlib.import_module(f"{self.package}.{module.name}")
            self._loaded = True
        return sorted(self._found)

    def get(self, name: str) -> Kind:
        names = self.names()
        if not isinstance(name, str) or name not in self._found:  # a name out of a file may be anything
            raise UserError(
                f"no {self.what} called {name!r}{did_you_mean(str(name), names)} (have: {', '.join(names)})"
            )
        return self._found[name]
