"""The report of `headstock ensemble`, rendered from its results.json."""

from headstock.errors import UserError
from headstock.report.render import render
from headstock.train.run_folder import RunFolder

REQUIRED_KEYS = ("members", "valid", "verdict", "fitted_on")


def ensemble_page(run: RunFolder) -> str:
    results = run.results()
    if missing := [key for key in REQUIRED_KEYS if key not in results]:
        raise UserError(f"{run}: its results.json lacks {', '.join(missing)}; run headstock ensemble again")
    splits = [split for split in ("valid", "test") if split in results]
    return render(__package__, "ensemble.html", results=results, splits=splits)
