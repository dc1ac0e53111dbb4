"""Runs the kernels of notebooks in forked processes, which start with torch imported."""

import os
import sys
from importlib.metadata import EntryPoint
from typing import Any

from jupyter_client.provisioning import KernelProvisionerFactory, LocalProvisioner

from tests.forks import start_forked


class KernelProcess:
    """A kernel in a forked process, with what a provisioner uses of `subprocess.Popen`."""

    stdin = stdout = stderr = None

    def __init__(self, arguments: list[str], environment: dict[str, str], folder: str):
        self.process = start_forked(_run_kernel, arguments, environment, folder)

    def poll(self) -> int | None:
        return self.process.exitcode

    def wait(self) -> int | None:
        self.process.join()
        return self.process.exitcode

    def send_signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)


class ForkedProvisioner(LocalProvisioner):
    """Starts the command `python -m ipykernel_launcher ARGUMENTS` in a forked process."""

    async def launch_kernel(self, cmd: list[str], **options: Any) -> dict[str, Any]:
        arguments = cmd[cmd.index("ipykernel_launcher") + 1 :]
        self.process = KernelProcess(arguments, dict(options["env"]), str(options["cwd"]))
        self.pid = self.process.process.pid
        return self.connection_info


def fork_kernels(monkeypatch: Any) -> None:
    """Start the kernels of this test with `ForkedProvisioner`."""
    factory, name = KernelProvisionerFactory.instance(), "forked-provisioner"
    entry = EntryPoint(name, f"{__name__}:{ForkedProvisioner.__name__}", factory.GROUP_NAME)
    monkeypatch.setitem(factory.provisioners, name, entry)
    monkeypatch.setattr(factory, "default_provisioner_name", name)


def _run_kernel(arguments: list[str], environment: dict[str, str], folder: str) -> None:
    from ipykernel.kernelapp import launch_new_instance

    os.setsid()
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(nothing, stream)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv = ["ipykernel_launcher", *arguments]
    launch_new_instance()
