"""Which requirements of the package and of its extras are installed, by the metadata of the package itself."""

from collections.abc import Iterator
from importlib import metadata

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PACKAGE = "headstock"


def extras(package: str = PACKAGE) -> list[str]:
    """Empty if the package is used from its source tree without being installed."""
    try:
        return metadata.metadata(package).get_all("Provides-Extra") or []
    except metadata.PackageNotFoundError:
        return []


def requirements(package: str, extra: str | None = None) -> list[Requirement]:
    """What a package needs on this platform, or what one of its extras needs beyond that."""
    parsed = [Requirement(text) for text in _required(package)]
    return [each for each in parsed if _applies(each, extra or "") and (not extra or not _applies(each, ""))]


def _required(package: str) -> list[str]:
    try:
        return metadata.requires(package) or []
    except metadata.PackageNotFoundError:
        return []


def _applies(requirement: Requirement, extra: str) -> bool:
    environment = {name: str(value) for name, value in default_environment().items()}
    return requirement.marker is None or requirement.marker.evaluate({**environment, "extra": extra})


def flattened(package: str, extra: str | None) -> Iterator[Requirement]:
    """The requirements of an extra, with those of the extras it names in place of the package itself."""
    for requirement in requirements(package, extra):
        if canonicalize_name(requirement.name) == canonicalize_name(package):
            for other in sorted(requirement.extras):
                yield from flattened(package, other)
        else:
            yield requirement


def missing(package: str = PACKAGE, extra: str | None = None) -> list[str]:
    """The requirements that are not met, with the version that is installed instead: `ray>=2.60 (2.40 installed)`."""
    problems = [problem for each in flattened(package, extra) for problem in unmet(each)]
    return list(dict.fromkeys(problems))


def unmet(requirement: Requirement) -> Iterator[str]:
    version = installed_version(requirement.name)
    wanted = f"{requirement.name}{requirement.specifier}"
    if version is None:
        yield wanted
        return
    if not requirement.specifier.contains(version, prereleases=True):
        yield f"{wanted} ({version} installed)"
    for extra in sorted(requirement.extras):  # of ray[data], what `data` adds
        for inner in requirements(requirement.name, extra):
            yield from unmet(inner)


def installed_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def versions(package: str = PACKAGE) -> dict[str, str]:
    """The installed versions of all requirements and of those of the extras, in the order of the metadata."""
    found: dict[str, str] = {}
    for extra in (None, *extras(package)):
        for requirement in flattened(package, extra):
            if (version := installed_version(requirement.name)) is not None:
                found.setdefault(requirement.name, version)
    return found
