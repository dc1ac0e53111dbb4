"""What a server allows: where it listens, who may ask, and how much."""

from dataclasses import dataclass, fields

from headstock.errors import ConfigError

LOCAL_HOSTS = ("127.0.0.1", "::1", "localhost")
MEGABYTE = 1_000_000


@dataclass(frozen=True)
class ServeSettings:
    host: str = "127.0.0.1"
    port: int = 8000
    token: str | None = None  # clients send it as `Authorization: Bearer TOKEN`; required unless the host is local
    allow_hosts: tuple[str, ...] = ()  # further names in the Host header, such as that of a reverse proxy
    workers: int = 1  # processes, each with its own copy of the models
    timeout: float = 60.0  # seconds that a request may take, in the queue and in the model
    grace: float = 30.0  # seconds that running requests have to finish when the server stops
    max_queue: int = 256  # requests that wait for one run; further ones are answered by 503
    max_connections: int = 512  # open connections; further ones are answered by 503
    max_body: int = MEGABYTE  # bytes of a request
    max_file: int = 20 * MEGABYTE  # bytes of an uploaded table
    max_texts: int = 256  # rows in one request
    max_characters: int = 20_000  # in one text
    max_candidates: int = 500  # of one request: the number of masks times `top`
    max_tokens: int = 1024  # new tokens of one completion
    max_samples: int = 16  # completions of one prompt (`n`)
    max_top: int = 100  # alternatives (`logprobs`, `top`) and `top_k` are limited to the vocabulary and this
    socket_timeout: float = 10.0  # seconds in which a request must arrive, and in which a client must take its answer

    def __post_init__(self) -> None:
        problems = []
        if self.host not in LOCAL_HOSTS and not self.token:
            problems.append(("token", f"--host {self.host} is reachable from other machines, so it needs --token"))
        if self.token is not None and not is_header_value(self.token):
            problems.append(("token", "must be printable ASCII characters without spaces"))
        if not 0 <= self.port < 2**16:
            problems.append(("port", f"must be from 0 (any free port) to 65535, not {self.port}"))
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name != "port" and isinstance(value, int | float) and value <= 0:
                problems.append((field.name, f"must be above 0, not {value}"))
        if problems:
            raise ConfigError(problems)


def is_header_value(text: str) -> bool:
    return bool(text) and text.isascii() and text.isprintable() and " " not in text
