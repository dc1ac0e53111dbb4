"""`headstock serve`: runs behind a web page and an HTTP API."""

from typing import Annotated, Any

import typer

from headstock.cli.command import Common, command
from headstock.cli.options import RUN_HELP, Int8
from headstock.errors import UserError


@command("Use a run")
def serve(
    common: Common,
    runs: Annotated[list[str], typer.Argument(help=f"One or more runs. {RUN_HELP}")],
    host: Annotated[str, "Address to listen on; any but this machine's own needs --token."] = "127.0.0.1",
    port: Annotated[int, "Port to listen on; 0 for any free one."] = 8000,
    token: Annotated[str | None, "Clients must send this as `Authorization: Bearer TOKEN`."] = None,
    int8: Int8 = False,
) -> dict[str, Any]:
    """Serve runs as a web page and an API that OpenAI's clients speak.

    Example: headstock serve reviews-en --open
    Example: headstock serve runs/scratch runs/pretrained --port 8080
    """
    try:
        from headstock.serve.server import run_server
    except ModuleNotFoundError as error:
        raise UserError(f"serve needs {error.name}: pip install 'headstock[serve]'") from None
    from headstock.serve.models import load_models
    from headstock.serve.settings import ServeSettings

    settings = ServeSettings(host=host, port=port, token=token)
    models = load_models(runs, settings, device=common.device, int8=int8)
    names = ", ".join(model.name for model in models)
    run_server(models, settings, on_ready=lambda url: common.log(f"serving {names} at {url}"))
    return {}
