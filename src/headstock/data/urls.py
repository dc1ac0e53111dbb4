"""URLs in place of paths: how they are recognized, shown and stored without credentials, and which file they name."""

import posixpath
import re
from pathlib import Path, PurePosixPath
from urllib.parse import unquote, urlsplit

URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:(:|/)")  # one slash: pathlib drops the other
USER = re.compile(r"(?<![\w+.-])(?P<scheme>[A-Za-z][\w+.-]*)://(?P<user>[^/?#\s]*)@")
SECRET = re.compile(  # parameters of a query, by the last word of their names, such as X-Amz-Signature
    r"(?i)([?&;](?:[^=&;#\s]*[-_.])?"
    r"(?:sig|signature|token|secret|password|passwd|pwd|credential|auth|authorization|(?:api|access)?[-_]?key(?:id)?)="
    r")[^&;#\s]+"
)
MASK = "***"
HTTP = ("http", "https")
NOT_SECRET = ("abfs", "abfss", "wasb", "wasbs", "az", "adl")  # the part before @ is a container, no user

_credentials: dict[str, str] = {}  # what this process was given: masked URLs and hosts to the original ones


def is_url(path: str | Path) -> bool:
    return URL.match(str(path)) is not None


def normalize(path: str | Path) -> str:
    """A URL with both of its slashes, after it may have been a `Path`."""
    return re.sub(r"^([A-Za-z][A-Za-z0-9+.-]+):/(?=[^/])", r"\1://", str(path))


def scheme_of(url: str) -> str:
    return normalize(url).partition(":")[0].lower()


def is_http(url: str) -> bool:
    return scheme_of(url) in HTTP


# Credentials


def hide_credentials(text: str) -> str:
    """A URL, or a text with URLs in it, without passwords, tokens and signatures."""

    def mask(match: re.Match[str]) -> str:
        scheme, user = match["scheme"], match["user"]
        if scheme.lower() in NOT_SECRET or not user:
            return match[0]
        if scheme.lower() in HTTP:  # a user name alone may be a token
            return f"{scheme}://{MASK}@"
        name, colon, _ = user.partition(":")
        return f"{scheme}://{name}{colon and f':{MASK}'}@"

    return SECRET.sub(rf"\g<1>{MASK}", USER.sub(mask, text))


def redact(path: str) -> str:
    """A path or URL as it is shown and stored. This process can still open it: see `with_credentials`."""
    if not is_url(path):
        return path
    url = normalize(path)
    shown = hide_credentials(url)
    if shown != url and MASK not in url:
        _credentials[shown] = url
        _credentials[host_of(shown)] = host_of(url)
    return shown


def with_credentials(url: str) -> str:
    """The URL with the credentials that this process was given for it or its host, if any."""
    url = normalize(url)
    if MASK not in url:
        return url
    if url in _credentials:
        return _credentials[url]
    host = host_of(url)
    known = _credentials.get(host) or host.replace(f":{MASK}@", "@").replace(f"{MASK}@", "")
    return known + url.removeprefix(host)


def host_of(url: str) -> str:
    """`https://user@host`, the part before the path."""
    match = re.match(r"[^/]*//[^/?#]*", url)
    return match[0] if match else url


# Names


def file_name(path: str | Path) -> str:
    """The name of a file, given by a path or URL; of a URL without its query."""
    if not is_url(path):
        return Path(path).name
    return PurePosixPath(url_path(str(path))).name


def url_path(url: str) -> str:
    if not is_http(url):
        return normalize(url)
    return unquote(urlsplit(normalize(url)).path)


def sibling(url: str, name: str) -> str:
    """The URL of another file in the same folder."""
    base, query = split_query(normalize(url))
    return f"{posixpath.dirname(base)}/{name}{query}"


def join(folder: str, name: str) -> str:
    base, query = split_query(normalize(folder))
    return f"{base.rstrip('/')}/{name}{query}"


def split_query(url: str) -> tuple[str, str]:
    match = re.search(r"[?#]", url) if is_http(url) else None
    return (url[: match.start()], url[match.start() :]) if match else (url, "")
