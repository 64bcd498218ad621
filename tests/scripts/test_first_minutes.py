"""A stranger's first ten minutes, with nothing but README: its commands run as it has them.

The package is a wheel, built from the sources, which pip installs without a network into an empty
environment.  What pip would download for it is there already: links to the installed packages that the
wheel's own metadata ask for, and to those that these ask for in turn, each whole and with its metadata.
So pip itself checks that the wheel needs nothing else, and neither torch nor Megatron can be imported,
since they are not there.  The other environment also finds everything that is installed here, as
``megatron_pp_ext[train]`` would install it; its package is the wheel too.  Not tested is a download.
"""

import json
import os
import re
import subprocess
import sys
import sysconfig
import zipfile
from importlib.metadata import Distribution, PathDistribution, distribution
from pathlib import Path

import pytest
from matplotlib.image import imread
from packaging.requirements import Requirement

from tests.support.browser import ANSWER, BROWSER, asked, screenshot
from tests.support.documents import COMMANDS, ROOT, Block, blocks_of

README = [
    block for block in blocks_of(ROOT / "README.md") if block.language in COMMANDS and block.reason is None
]
"""The blocks of commands that run without GPUs, SLURM and a network."""

TRAINING = re.compile(r"^(?:torchrun|mpp verify)\b", re.MULTILINE)
"""How commands begin that need torch."""

PLANNING = [block for block in README if not TRAINING.search(block.text)]
PLANNED = "\n".join(block.text for block in PLANNING)


def test_readme_goes_from_the_installation_to_the_proof() -> None:
    text = (ROOT / "README.md").read_text()
    places = [
        text.index(words)
        for words in (
            "pip install .",
            "mpp schedule v-half",
            "## Which schedule to choose",
            "mpp estimate --model",
            "mpp search --model",
            "torchrun --nproc-per-node",
            "mpp verify",
        )
    ]
    assert places == sorted(places)
    assert {"schedule", "compare", "estimate", "search"} <= set(
        re.findall(r"^mpp (\w+)", PLANNED, re.MULTILINE)
    )
    assert "stock 1F1B: " in "".join(block.output for block in PLANNING)
    assert len(README) > len(PLANNING)


def required(wheel: Path) -> dict[str, Distribution]:
    """Return the installed packages that ``wheel`` needs without an extra, with those that they need."""
    archive = zipfile.Path(wheel)
    (metadata,) = (path for path in archive.iterdir() if path.name.endswith(".dist-info"))
    packages: dict[str, Distribution] = {}
    todo = list(PathDistribution(metadata).requires or ())
    while todo:
        requirement = Requirement(todo.pop())
        is_needed = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if is_needed and requirement.name not in packages:
            packages[requirement.name] = package = distribution(requirement.name)
            todo += package.requires or ()
    return packages


def environment(folder: Path, wheel: Path, *, with_torch: bool) -> Path:
    """Make an environment with ``wheel`` in ``folder``, and return the folder of its programs."""
    pytest.importorskip("pip")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    programs = folder / "bin"
    places = {"base": str(folder), "platbase": str(folder), "installed_base": str(folder)}
    site = Path(sysconfig.get_path("purelib", "venv", places))
    options = ["--no-index", "--quiet", "--no-warn-script-location"]
    if with_torch:
        options.append("--no-deps")
        folders = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
        (site / "all-else.pth").write_text("\n".join(folders))
        program = f"#!{programs / 'python'}\nfrom torch.distributed.run import main\n\nmain()\n"
        (programs / "torchrun").write_text(program)
        (programs / "torchrun").chmod(0o755)
    else:
        for package in required(wheel).values():
            tops = {file.parts[0] for file in package.files or ()} - {"..", "__pycache__"}
            for top in tops:
                (site / top).symlink_to(package.locate_file(top))
    pip = [sys.executable, "-m", "pip", "--python", programs / "python", "install", *options, wheel]
    installed = subprocess.run(pip, capture_output=True, text=True, check=False)
    assert installed.returncode == 0, installed.stderr
    return programs


def shell(command: list[str | Path], programs: Path, desk: Path) -> subprocess.CompletedProcess[str]:
    """Run ``command`` in the folder ``desk``, which is home too, with ``programs`` and without a network."""
    nowhere = "http://127.0.0.1:9"
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    settings = {
        "PATH": f"{programs}:/usr/bin:/bin",
        "HOME": str(desk),
        "MEGATRON_PP_EXT_CACHE": str(desk / "cache"),
        "http_proxy": nowhere,
        "https_proxy": nowhere,
    }
    return subprocess.run(
        command,
        cwd=desk,
        env={**clean, **settings},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1800,
        check=False,
    )


def run(block: Block, programs: Path, desk: Path) -> None:
    """Run ``block`` as pasted into a shell; it prints what README shows."""
    done = shell(["bash", "-euo", "pipefail", "-c", block.text], programs, desk)
    assert done.returncode == 0, f"{block}\n{done.stdout[-4000:]}"
    assert block.missing(done.stdout) == [], f"{block}\n{done.stdout[-4000:]}"


@pytest.fixture
def desk(tmp_path: Path) -> Path:
    """An empty folder, away from the sources."""
    folder = tmp_path / "desk"
    folder.mkdir()
    return folder


@pytest.mark.wide
def test_to_look_choose_and_plan_takes_no_torch(wheel: Path, desk: Path, tmp_path: Path) -> None:
    programs = environment(tmp_path / "plans", wheel, with_torch=False)
    for module in ("torch", "megatron"):
        assert shell(["python", "-c", f"import {module}"], programs, desk).returncode == 1
    for block in PLANNING:
        run(block, programs, desk)
    notebook = shell(["python", "-c", cells()], programs, desk)
    assert notebook.returncode == 0, notebook.stdout
    pictures, pages = (re.findall(rf"--{kind} (\S+)", PLANNED) for kind in ("png", "html"))
    assert pictures and len(pages) >= 2
    for picture in pictures:
        assert colours(desk / picture) > 10
    if BROWSER is None:
        pytest.skip("all commands ran; there is no Chromium to open the pages in")
    for page in pages:
        for width in (400, 1400):
            open_page(desk / page, tmp_path / f"{Path(page).stem}-{width}.png", width)


def cells() -> str:
    """Return the code of the notebook that README names."""
    notebook = json.loads((ROOT / "examples" / "schedules.ipynb").read_text())
    code = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert any("pp.estimate(" in cell for cell in code)
    return "\n".join(code)


def colours(picture: Path) -> int:
    """Return the number of colours of a PNG file, which has one where it is blank."""
    return len({tuple(pixel) for row in imread(picture) for pixel in row})


_WIDTHS = "{found: document.documentElement.scrollWidth, window: document.documentElement.clientWidth}"


def open_page(page: Path, picture: Path, width: int) -> None:
    """Show ``page`` in a browser, and leave a picture of it: it fits, is not blank, and has no errors."""
    assert screenshot(page, picture, width) == []
    assert imread(picture).shape[1] == width
    assert colours(picture) > 10, f"{page} is blank at {width} pixels"
    sizes = asked(page, f"<script>{ANSWER % _WIDTHS}</script>", picture.parent, width)
    assert sizes["found"] <= sizes["window"], f"{page} has to be scrolled sideways at {width} pixels"


@pytest.mark.wide
@pytest.mark.skipif(BROWSER is None, reason="there is no Chromium to show a page in")
@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("<p>one two three<script>none()</script>", "none is not defined"),
        ("", "is blank"),
        ('<p style="width:2000px">one two three', "scrolled sideways"),
    ],
)
def test_a_page_that_is_broken_is_noticed(body: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(f"<!doctype html><meta charset=utf-8><body>{body}")
    with pytest.raises(AssertionError, match=problem):
        open_page(tmp_path / "page.html", tmp_path / "page.png", 400)


@pytest.mark.wide
def test_to_train_and_to_verify(wheel: Path, desk: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    programs = environment(tmp_path / "trains", wheel, with_torch=True)
    place = "import megatron_pp_ext, torch; print(megatron_pp_ext.__file__)"
    assert shell(["python", "-c", place], programs, desk).stdout.startswith(str(tmp_path / "trains"))
    for block in README:
        if block not in PLANNING:
            run(block, programs, desk)
