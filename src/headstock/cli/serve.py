"""`headstock serve`: runs behind a web page and an HTTP API."""

from typing import Annotated, Any

import typer

from headstock.cli.command import Common, command, to_json
from headstock.cli.options import RUN_HELP, Calibrated, Int8
from headstock.cli.terminal import write_out
from headstock.errors import UserError

STOCK = "reviews-en"  # the bundled run that is served when none is named


@command("Use a run")
def serve(
    common: Common,
    runs: Annotated[
        list[str] | None, typer.Argument(help=f"One or more runs. {RUN_HELP} Default: {STOCK}.", show_default=False)
    ] = None,
    host: Annotated[str, "Address to listen on; any but this machine's own needs --token."] = "127.0.0.1",
    port: Annotated[int, "Port to listen on; 0 for any free one."] = 8000,
    token: Annotated[
        str | None,
        typer.Option(
            "--token", envvar="HEADSTOCK_TOKEN", help="Clients must send this as `Authorization: Bearer TOKEN`."
        ),
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        typer.Option("--allow-host", help="Also answer to this name, such as a reverse proxy's; repeatable."),
    ] = None,
    workers: Annotated[int, "Processes, each with its own copy of the runs."] = 1,
    timeout: Annotated[float, "Seconds that a request may take."] = 60.0,
    open_: Annotated[bool, "Open the page in the browser."] = False,
    int8: Int8 = False,
    calibrated: Calibrated = False,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="A limit, such as --set max_tokens=2048; repeatable.")
    ] = None,
) -> dict[str, Any]:
    """Serve runs as a web page and an OpenAI-compatible API.

    Prints the URL once requests are answered. Ctrl-C or SIGTERM stops it after the requests that are running.

    Example: headstock serve reviews-en --open
    Example: headstock serve runs/scratch runs/pretrained --port 8080
    """
    try:
        from headstock.serve.server import run_server
    except ModuleNotFoundError as error:
        raise UserError(f"serve needs {error.name}: pip install 'headstock[serve]'") from None
    from headstock.config import from_dict, parse_setting
    from headstock.serve.settings import LOCAL_HOSTS, ServeSettings

    named = {"host": host, "port": port, "token": token, "allow_hosts": allow_host or []}
    named |= {"workers": workers, "timeout": timeout}
    limits = dict(parse_setting(text) for text in set_ or [])
    if name := next((name for name in limits if name in named), None):
        raise UserError(f"--set {name}: has an option of its own (see headstock serve --help)")
    settings = from_dict(ServeSettings, limits | named)
    result: dict[str, Any] = {}

    def ready(url: str, models: list[str]) -> None:
        result.update(url=url, models=models)
        write_out(to_json(result) if common.json else url)
        where = "" if host in LOCAL_HOSTS else f" at {host}, open to other machines"
        common.log(f"serving {', '.join(models)}{where}; stop with Ctrl-C")
        if open_:
            open_browser(url)

    options = {"device": common.device, "int8": int8, "calibrated": calibrated}
    run_server(runs or [STOCK], settings, options, ready)
    common.log("stopped")
    return result


def open_browser(url: str) -> None:
    import threading
    import webbrowser

    threading.Thread(target=webbrowser.open, args=[url], daemon=True).start()  # a text browser returns when it is left
