"""The checks of `headstock doctor`: what is installed, what works, and what is missing, ready for a bug report."""

import tempfile
from collections.abc import Iterator, Sized
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import headstock
from headstock.data.remote import megabytes
from headstock.io import cache_folder
from headstock.maintenance import extras, system
from headstock.maintenance.cache import cache_sizes
from headstock.maintenance.self_test import STAGES, SelfTest, run_self_test

LOW_DISK = 1_000_000_000  # bytes; a warning
MANY = 3  # of an extra's missing packages are named; more are counted


@dataclass
class Diagnosis:
    """Facts about an installation, problems that stop Headstock from working, and warnings."""

    system: dict[str, str]
    versions: dict[str, str]  # of Python and of every requirement that is installed
    extras: dict[str, list[str]]  # requirements that are missing, by extra
    folders: dict[str, str]
    environment: dict[str, str]
    self_test: SelfTest
    problems: list[str]
    warnings: list[str]

    def to_dict(self) -> dict[str, Any]:
        return {"ok": not self.problems, **asdict(self)}

    def markdown(self) -> str:
        """The report as Markdown that also reads well in a terminal."""
        lines = [f"**headstock {headstock.__version__}**: {self.verdict()}", ""]
        lines += [f"- problem: {text}" for text in self.problems] + [f"- warning: {text}" for text in self.warnings]
        sections = {
            "System": self.system,
            "Versions": {"Python": self.versions["Python"]} | package_facts(self.versions),
            "Extras": {name: describe_missing(missing) for name, missing in self.extras.items()},
            "Folders": self.folders,
            "Environment": self.environment or {"variables": "none that matter"},
            "Self-test": self_test_facts(self.self_test),
        }
        for title, facts in sections.items():
            lines += ["", f"**{title}**", "", *(f"- {name}: {value}" for name, value in facts.items())]
        return "\n".join(lines).replace("\n\n\n", "\n\n")

    def verdict(self) -> str:
        if self.problems:
            return count(self.problems, "problem")
        return "works" + (f", {count(self.warnings, 'warning')}" if self.warnings else "")


def count(items: Sized, noun: str) -> str:
    return f"{len(items)} {noun}{'s' * (len(items) != 1)}"


def diagnose(device: str = "auto", *, seed: int = 0, self_test: bool = True) -> Diagnosis:
    """Check the installation. Without `self_test`, torch is imported but no model is trained."""
    test = run_self_test(device, seed=seed, stages=STAGES if self_test else STAGES[:1])
    return Diagnosis(
        system=system_facts(test),
        versions={"Python": system.python_name(), **extras.versions()},
        extras={extra: extras.missing(extra=extra) for extra in extras.extras()},
        folders=folder_facts(),
        environment=system.environment_variables(),
        self_test=test,
        problems=list(problems(test)),
        warnings=list(warnings(test)),
    )


# Facts


def system_facts(test: SelfTest) -> dict[str, str]:
    facts = {"platform": system.platform_name(), "CPU": system.cpu_name()}
    if torch := test.stages.get("torch"):
        facts["CPU"] += f", {torch['threads']} torch threads ({torch['cpu_capability']})"
        facts["memory free"] = megabytes(torch["free_bytes"])
        facts["GPU"] = "; ".join(torch["devices"]) or "none that torch can use"
        facts["torch build"] = f"{torch['version']}, " + (f"CUDA {torch['cuda']}" if torch["cuda"] else "without CUDA")
    if gpus := system.nvidia_gpus():
        facts["nvidia-smi"] = "; ".join(gpus)
    return facts | {"browser": system.browser_name() or "none"}


def package_facts(versions: dict[str, str]) -> dict[str, str]:
    """The versions of what every installation needs, and of what only extras need."""
    required = {requirement.name for requirement in extras.requirements(extras.PACKAGE)}
    packages = {name: version for name, version in versions.items() if name != "Python"}
    groups = {"required": [name for name in packages if name in required]}
    groups["optional"] = [name for name in packages if name not in required]
    return {title: ", ".join(f"{name} {packages[name]}" for name in names) for title, names in groups.items() if names}


def describe_missing(missing: list[str]) -> str:
    more = f" and {len(missing) - MANY} more" if len(missing) > MANY else ""
    return f"missing {', '.join(missing[:MANY])}{more}" if missing else "complete"


def folders() -> dict[str, Path]:
    return {"cache": cache_folder(), "current": Path.cwd(), "temporary": Path(tempfile.gettempdir())}


def folder_facts() -> dict[str, str]:
    facts = {"package": system.anonymous(Path(headstock.__file__).parent)}
    for name, folder in folders().items():
        error = system.write_error(folder)
        state = f"not writable: {error}" if error else f"writable, {megabytes(system.free_disk(folder))} free"
        facts[name] = f"{system.anonymous(folder)} ({state})"
    sizes = cache_sizes(cache_folder())
    facts["in the cache"] = ", ".join(f"{name} {megabytes(size)}" for name, size in sizes.items()) or "nothing"
    return facts


def self_test_facts(test: SelfTest) -> dict[str, str]:
    facts = {}
    if result := test.stages.get("pretrain"):
        facts["pretrain"] = (
            f"{result['steps']:,} steps in {result['seconds']:.1f} s on {result['device']}, "
            f"{result['tokens_per_second']:,.0f} tokens/s, validation loss {result['valid_loss']:.2f}"
        )
    if result := test.stages.get("load"):
        facts["save and load"] = f"{result['bytes'] / 1e6:.1f} MB"
    if result := test.stages.get("generate"):
        facts["generate"] = " ".join(result["text"].split())
    if test.error:
        facts["failed"] = system.anonymous(test.error)
    return facts or {"model": "not run"}


# Problems


def problems(test: SelfTest) -> Iterator[str]:
    """What stops Headstock from working."""
    for requirement in extras.missing():
        yield f"requirement not met: {requirement}"
    for name, folder in folders().items():
        if name != "current" and (error := system.write_error(folder)):
            yield f"the {name} folder {system.anonymous(folder)} is not writable ({error})"
    if test.error:
        yield f"self-test failed: {system.anonymous(test.error)}"


def warnings(test: SelfTest) -> Iterator[str]:
    metadata_version = extras.installed_version(extras.PACKAGE)
    if metadata_version is None:
        yield "headstock is not installed as a package but imported from a folder: its requirements are not checked"
    elif metadata_version != headstock.__version__:
        yield f"the package metadata is of version {metadata_version}: install the package again"
    if error := system.write_error(Path.cwd()):
        yield f"the current folder is not writable ({error}): give --out a path elsewhere"
    for name, folder in folders().items():
        if system.free_disk(folder) < LOW_DISK:
            yield f"the disk of the {name} folder has {megabytes(system.free_disk(folder))} left"
    torch = test.stages.get("torch")
    if torch and torch["cuda"] is None and system.nvidia_gpus():
        yield "there is an NVIDIA GPU, but this build of torch has no CUDA: see docs/start/install.md"
