"""`headstock doctor`: checks the installation."""

from typing import Annotated, Any

from headstock.cli.command import Common, command
from headstock.errors import UserError, WorkError, did_you_mean

DEVICES = ("auto", "cpu", "cuda", "mps")


@command("Maintain")
def doctor(
    common: Common,
    self_test: Annotated[bool, "Pretrain, save, load and generate with a tiny model."] = True,
) -> dict[str, Any]:
    """Check the installation, for yourself or for a bug report.

    Lists versions, devices, extras, folders and environment variables, without user names, home folders or secrets,
    and trains a tiny model for a few seconds. The exit code is 1 if something essential does not work.
    """
    if common.device not in DEVICES:
        hint = did_you_mean(common.device, DEVICES)
        raise UserError(f"--device {common.device}: must be one of {', '.join(DEVICES)}{hint}")
    from headstock.maintenance.doctor import diagnose

    if self_test:
        common.log("running the self-test (about ten seconds)")
    diagnosis = diagnose(common.device, seed=common.seed or 0, self_test=self_test)
    common.show(diagnosis.markdown())
    if diagnosis.problems:
        raise WorkError(f"{diagnosis.verdict()}: {'; '.join(diagnosis.problems)}", result=diagnosis.to_dict())
    return diagnosis.to_dict()
