"""Models of the Hugging Face Hub by name, `hf://ORG/NAME[@REVISION]`, and exports pushed to it.

The client is huggingface_hub, so its environment variables apply: HF_ENDPOINT, HF_HUB_OFFLINE, HF_HOME, HF_TOKEN.
"""

import logging
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headstock.cache_use import mark_used
from headstock.config import read_settings
from headstock.errors import UserError, WorkError
from headstock.interop import missing_dependency
from headstock.logs import LOGGER
from headstock.train.run_folder import RunFolder, hub_runs

logger = logging.getLogger(__name__)

NAME = re.compile(r"hf:/{1,2}([^/@\s]+(?:/[^/@\s]+)?)(?:@(\S+))?")  # pathlib turns the two slashes into one
COMMIT = re.compile(r"[0-9a-f]{40}")
LOG_IN = "log in with `hf auth login` or set HF_TOKEN"
DESCRIPTION = ("config.json", "README.md")
TOKENIZER = ["tokenizer.json", "tokenizer_config.json", "vocab.txt", "vocab.json", "merges.txt"]
TOKENIZER += ["spiece.model", "tokenizer.model", "sentencepiece.bpe.model", "source.spm", "target.spm"]
WEIGHTS = ("model.safetensors", "pytorch_model.bin")  # the second is read if the first is missing, weights only


@dataclass(frozen=True)
class HubModel:
    """A model repository at a branch, tag or commit."""

    repo: str  # ORG/NAME
    revision: str | None = None  # None: the default branch

    def __str__(self) -> str:
        return f"hf://{self.repo}" + (f"@{self.revision}" if self.revision else "")

    @property
    def is_pinned(self) -> bool:
        return self.revision is not None and COMMIT.fullmatch(self.revision) is not None

    @property
    def cached_run(self) -> RunFolder:
        """The run that a pinned model is imported as when a command names it."""
        assert self.is_pinned
        return RunFolder(hub_runs() / f"{self.repo}@{self.revision}")


def parse_hub_name(name: str | Path) -> HubModel:
    match = NAME.fullmatch(str(name))
    if match is None or ".." in match[0]:
        raise UserError(f"{name}: expected hf://ORG/NAME or hf://ORG/NAME@REVISION")
    return HubModel(match[1], match[2])


def open_hub_run(name: str | Path, *, download: bool = True) -> RunFolder:
    """The run of a model, imported into the cache the first time; a pinned and imported one needs no network."""
    from filelock import FileLock

    model = parse_hub_name(name)
    if model.is_pinned and RunFolder(mark_used(model.cached_run.path)).is_finished():
        return model.cached_run
    if not download:
        raise UserError(f"{model}: has not been imported on this machine")
    snapshot, pinned = download_model(model)
    run = pinned.cached_run
    mark_used(run.path)
    run.path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(run.path.parent / f".{run.path.name}.lock"):  # several processes may start at once
        return run if run.is_finished() else import_snapshot(snapshot, model, pinned, run.path)


def import_hub_run(name: str | Path, out: Path) -> RunFolder:
    """Download a model and import it as a run of its own."""
    model = parse_hub_name(name)
    snapshot, pinned = download_model(model)
    return import_snapshot(snapshot, model, pinned, out)


def import_snapshot(snapshot: Path, model: HubModel, pinned: HubModel, out: Path) -> RunFolder:
    from huggingface_hub import constants

    from headstock.interop.huggingface import import_folder

    origin: dict[str, Any] = {"repo": model.repo, "revision": model.revision or constants.DEFAULT_REVISION}
    origin |= {"commit": pinned.revision, "endpoint": constants.ENDPOINT, "license": licence(snapshot / "README.md")}
    return import_folder(snapshot, out, source=str(pinned), provenance={"hub": origin})


# Download


def download_model(model: HubModel) -> tuple[Path, HubModel]:
    """The files that an import reads, in huggingface_hub's cache, and the model pinned to their commit.

    Small files come first, so that an unsupported model is refused before its weights are downloaded.
    """
    from headstock.interop.huggingface.importer import find_architecture

    with hub_client(model) as client:
        from huggingface_hub import snapshot_download

        def fetch(model: HubModel, names: Sequence[str]) -> Path:
            revision, patterns = model.revision, list(names)
            return Path(snapshot_download(model.repo, revision=revision, allow_patterns=patterns, **client))

        snapshot = fetch(model, [*DESCRIPTION, *TOKENIZER])
        pinned = replace(model, revision=snapshot.name)
        if not (snapshot / "config.json").is_file():
            raise UserError(f"{model}: has no config.json, so it is not a model of transformers")
        find_architecture(read_settings(snapshot / "config.json"), str(model))
        logger.info(f"{model}: commit {pinned.revision}")
        for name in WEIGHTS:
            index = snapshot / f"{name}.index.json"
            fetch(pinned, [name, index.name])
            if (snapshot / name).is_file():
                return snapshot, pinned
            if index.is_file():
                fetch(pinned, sharded_files(index))
                return snapshot, pinned
    raise UserError(f"{model}: has no {' or '.join(WEIGHTS)}, nor shards of one")


def sharded_files(index: Path) -> list[str]:
    files = read_settings(index).get("weight_map")
    if not isinstance(files, dict) or not files:
        raise UserError(f"{index}: expected file names in weight_map, found none")
    names = sorted({re.sub(r"[*?\[]", "", str(file)) for file in files.values()})  # names, not patterns
    if outside := [name for name in names if Path(name).name != name]:
        raise UserError(f"{index}: names {', '.join(outside)}, which is not a file of this folder")
    return names


def licence(card: Path) -> str | None:
    """The licence that a model card declares."""
    from huggingface_hub.repocard import metadata_load

    try:
        metadata = (metadata_load(card) if card.is_file() else None) or {}
    except Exception as error:  # YAML that cannot be parsed: the card is no part of the model
        logger.info(f"{card}: its metadata cannot be read ({type(error).__name__})")
        return None
    name = metadata.get("license_name") if metadata.get("license") == "other" else metadata.get("license")
    return str(name) if name else None


@contextmanager
def hub_client(model: HubModel) -> Iterator[dict[str, Any]]:
    """The options of a call to huggingface_hub; its errors become one line."""
    from headstock import __version__

    try:
        from huggingface_hub import constants, errors
        from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
        from huggingface_hub.utils import logging as hub_logging
    except ImportError:
        raise missing_dependency("huggingface_hub") from None
    network_error: type[Exception] = getattr(errors, "HTTPError", OSError)  # of its HTTP library, which varies
    endpoint, verbosity = constants.ENDPOINT, hub_logging.get_verbosity()
    hub_logging.set_verbosity_error()
    visible = LOGGER.level <= logging.INFO and sys.stderr is not None and sys.stderr.isatty()
    hide_progress = not visible and not are_progress_bars_disabled()
    if hide_progress:
        disable_progress_bars()
    try:
        yield {"library_name": "headstock", "library_version": __version__}
    except errors.GatedRepoError:
        raise UserError(f"{model}: is gated; request access at {endpoint}/{model.repo}, then {LOG_IN}") from None
    except errors.RepositoryNotFoundError:
        raise UserError(f"{model}: no such model at {endpoint}; if it is private, {LOG_IN}") from None
    except errors.RevisionNotFoundError:
        raise UserError(f"{model}: the model has no such revision") from None
    except errors.HFValidationError as error:
        raise UserError(f"{model}: not a valid name ({first_line(error)})") from None
    except errors.LocalEntryNotFoundError as error:
        place = f"it is not complete in the cache {constants.HF_HUB_CACHE}"
        if constants.HF_HUB_OFFLINE:
            raise UserError(f"{model}: HF_HUB_OFFLINE is set, and {place}") from None
        reason = first_line(error.__cause__ or error)
        raise WorkError(f"{model}: cannot reach {endpoint} ({reason}), and {place}") from None
    except errors.OfflineModeIsEnabled:
        raise UserError(f"{model}: HF_HUB_OFFLINE is set, so {endpoint} is not contacted") from None
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        if status in (401, 403):
            reason = "no valid token" if status == 401 else "the token does not allow it"
            raise UserError(f"{model}: {endpoint} refused access ({status}): {reason}; {LOG_IN}") from None
        raise WorkError(f"{model}: {endpoint} answered {status}: {error.server_message or first_line(error)}") from None
    except (network_error, OSError) as error:
        hint = "run the command again; files that are complete are kept"
        raise WorkError(f"{model}: the transfer failed ({first_line(error)}); {hint}") from None
    finally:
        hub_logging.set_verbosity(verbosity)
        if hide_progress:
            enable_progress_bars()


def first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].removeprefix("Got: ")


# Push


def push_folder(folder: Path, repo: str, *, private: bool = False, dry_run: bool = False) -> dict[str, Any]:
    """Upload an exported folder as one commit, to a repository that is created if it does not exist."""
    sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    files = [{"path": name, "bytes": size} for name, size in sizes.items()]
    model = HubModel(repo)
    with hub_client(model) as client:
        from huggingface_hub import HfApi, constants

        result = {"repo": repo, "url": f"{constants.ENDPOINT}/{repo}", "private": private, "dry_run": dry_run}
        result |= {"files": files, "bytes": sum(sizes.values())}
        if dry_run:
            return result
        api = HfApi(**client)
        try:
            repo = api.create_repo(repo, private=private, exist_ok=True).repo_id  # with the user's name if it has none
            commit = api.upload_folder(repo_id=repo, folder_path=folder, commit_message="Upload from Headstock")
        except ValueError as error:  # the Hub refuses the metadata of the card
            raise WorkError(f"{model}: {' '.join(str(error).split())}") from None
    return result | {"repo": repo, "url": f"{constants.ENDPOINT}/{repo}", "commit": commit.oid}


def check_push_target(repo: str) -> str:
    """ORG/NAME of --push, which may also be written hf://ORG/NAME."""
    model = parse_hub_name(repo if repo.startswith("hf:") else f"hf://{repo}")
    if model.revision is not None or "/" not in model.repo:
        raise UserError(f"--push {repo}: expected ORG/NAME")
    return model.repo
