"""Registries: classes found by name in the modules of one package."""

import importlib
import pkgutil
from collections.abc import Callable
from typing import Generic, TypeVar

from headstock.errors import UserError, did_you_mean

Registered = TypeVar("Registered", bound=type)


class Registry(Generic[Registered]):
    """Maps names to the classes registered in one package. Adding a class takes one new file there."""

    def __init__(self, kind: str, package: str):
        self.kind, self.package = kind, package
        self._classes: dict[str, Registered] = {}
        self._loaded = False

    def add(self, name: str) -> Callable[[Registered], Registered]:
        """Class decorator that registers a class and sets its `name` attribute."""

        def register(cls: Registered) -> Registered:
            if name in self._classes:
                raise ValueError(f"two {self.kind}s are registered as {name!r}")
            self._classes[name] = cls
            cls.name = name  # type: ignore[attr-defined]
            return cls

        return register

    def names(self) -> list[str]:
        if not self._loaded:
            package = importlib.import_module(self.package)
            for module in pkgutil.iter_modules(package.__path__):
                importlib.import_module(f"{self.package}.{module.name}")
            self._loaded = True
        return sorted(self._classes)

    def get(self, name: str) -> Registered:
        names = self.names()
        if not isinstance(name, str) or name not in self._classes:  # a name read from a file may have any type
            hint = did_you_mean(str(name), names)
            raise UserError(f"unknown {self.kind} {name!r}{hint} (available: {', '.join(names)})")
        return self._classes[name]
