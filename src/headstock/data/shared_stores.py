"""Token stores shared at a URL (`stores=URL`): one machine builds a store, the others download it."""

import logging
import re
import tempfile
from pathlib import Path

from headstock.data import remote, urls
from headstock.data.token_shards import INDEX, read_index, verify_store
from headstock.errors import HeadstockError, UserError
from headstock.io import atomic_folder

logger = logging.getLogger(__name__)

FILE_NAME = re.compile(r"\w[\w.-]*")  # a name in an index, which cannot lead to another folder


def fetch_store(url: str, digest: str, folder: Path) -> bool:
    """Download the store with this fingerprint, if it is there and whole; False if it has to be built."""
    place = urls.join(urls.with_credentials(url), digest)
    try:
        with tempfile.TemporaryDirectory(prefix="headstock-") as records, atomic_folder(folder) as temporary:

            def fetch(*names: str) -> None:
                jobs = [(remote.open_url(urls.join(place, n)), temporary / n, Path(records) / n) for n in names]
                remote.download_all(jobs, reported=remote.BLOCK_BYTES)

            fetch(INDEX)
            index = read_index(temporary)
            names = list(index.get("files", {}))
            if index.get("fingerprint") != digest or not all(map(FILE_NAME.fullmatch, names)):
                raise UserError(f"{urls.redact(place)}: is not the store with this fingerprint")
            fetch(*names)
            verify_store(temporary)
        logger.info(f"using the token store {urls.redact(place)}")
        return True
    except remote.NotFound:
        return False
    except HeadstockError as error:
        logger.warning(f"{error}; building the token store here")
        return False


def share_store(url: str, folder: Path) -> None:
    """Upload a store, its index last, so that others never see a part of it; a failure is no reason to stop."""
    try:
        place = remote.open_url(urls.join(urls.with_credentials(url), folder.name))
        for path in sorted(folder.iterdir(), key=lambda path: path.name == INDEX):
            remote.upload(place, path.name, path)
        logger.info(f"shared the token store at {place.url}")
    except HeadstockError as error:
        logger.warning(f"the token store is not shared: {error}")
