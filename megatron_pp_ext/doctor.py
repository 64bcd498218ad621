"""What this machine has and lacks for running the schedules."""

import importlib.util
import platform
from importlib.metadata import PackageNotFoundError, version

import torch
from rich.console import Console
from rich.table import Table

PACKAGES = ("torch", "megatron-core", "transformer-engine", "apex")


def examine(console: Console) -> int:
    """Print versions, devices and every seam; return 0 if all seams fit, else 1."""
    found = Table("part", "found", title="Versions", title_justify="left")
    found.add_row("python", platform.python_version())
    for package in PACKAGES:
        found.add_row(package, _version(package))
    if torch.cuda.is_available():
        found.add_row("devices", f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}")
    else:
        found.add_row("devices", "no GPU: run scripts with --cpu")
    console.print(found)

    # The stand-ins let Megatron be imported on a machine without a GPU; the devices are known by now.
    if not torch.cuda.is_available():
        from megatron_pp_ext import cpu

        cpu.install()
    from megatron_pp_ext.integration import seams

    table = Table(title="Seams into Megatron", title_justify="left")
    table.add_column("seam", overflow="fold")
    table.add_column("for")
    table.add_column("fits")
    problems = []
    for seam in seams.all_seams():
        try:
            seam.find()
            fits = "yes"
        except seams.SeamError as error:
            problems.append(str(error))
            fits = "no"
        table.add_row(seam.path, seam.why, fits)
    console.print(table)
    for problem in problems:
        console.print(problem, soft_wrap=True)
    return 1 if problems else 0


def _version(package: str) -> str:
    try:
        found = version(package)
    except PackageNotFoundError:
        return "not installed"
    if package == "apex" and importlib.util.find_spec("apex.optimizers") is None:
        return f"{found}: not NVIDIA's apex, but the package of that name from PyPI; build it from source"
    return found
