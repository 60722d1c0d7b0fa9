"""The documentation keeps its promises: fresh blocks, living links, commands that run."""

from __future__ import annotations

import hashlib
import json
import pkgutil
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import pytest
from PIL import Image

from fedbicross.bundle.format import canonical_json
from fedbicross.cli import main

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / f"{folder}README.md" for folder in ("", "configs/", "results/")]
PAGES += sorted((ROOT / "docs").rglob("*.md"))
RESULTS = sorted((ROOT / "results").glob("*/results.json"))
LINK = re.compile(r"(!?)\[[^\]]*\]\(([^)\s]+)\)")
ABSOLUTE_PATH = re.compile(r"(?:^|[\s(`\"'=:])(/[a-z]+/[\w./-]+)", re.MULTILINE | re.IGNORECASE)
names = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())


def without_code(text: str) -> str:
    return re.sub(r"```.*?```", "", text, flags=re.DOTALL)


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", without_code(page.read_text(encoding="utf-8")), flags=re.MULTILINE)
    plain = [re.sub(r"[^\w\- ]", "", heading.replace("`", "").lower()) for heading in headings]
    return {heading.strip().replace(" ", "-") for heading in plain}


@pytest.mark.slow
def test_generated_blocks_are_fresh() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "docs.build", "--check"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"


@pytest.mark.slow
def test_a_stale_block_is_noticed_and_an_unknown_one_refused() -> None:
    code = (
        "from docs import build; page = build.ROOT / 'README.md'\n"
        "text = '<!-- generated: exit-codes -->\\nstale!\\n<!-- end -->'\n"
        "new = build.fill(text, page)\nassert 'stale!' not in new and '130' in new and build.fill(new, page) == new\n"
        "try: build.fill(text.replace('exit-codes', 'nonsense'), page)\n"
        "except KeyError: print('refused')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout == "refused\n", done.stderr


def test_no_line_is_lost() -> None:
    """MyST takes a line that begins with a percent sign for a comment and leaves it out, with what follows on it."""
    lost = [
        f"{page.name}: {line}"
        for page in PAGES
        for line in without_code(page.read_text(encoding="utf-8")).splitlines()
        if line.startswith("%")
    ]
    assert not lost


@names
def test_links_lead_somewhere(page: Path) -> None:
    for picture, link in LINK.findall(without_code(page.read_text(encoding="utf-8"))):
        if link.startswith(("http://", "https://", "mailto:")):
            assert not picture, f"{link}: pictures are kept here"
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.is_relative_to(ROOT), f"{link} leaves the repository"
        assert target.exists(), link
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), f"{link}: no such heading"


@pytest.mark.parametrize("page", [p for p in PAGES if p.parent.name == "methods"], ids=lambda page: page.stem)
def test_functions_that_the_page_of_a_method_names_are_there(page: Path) -> None:
    for name in re.findall(r"`((?:engine|methods|models|parts|steps)\.[\w.]+)`", page.read_text(encoding="utf-8")):
        assert pkgutil.resolve_name(f"fedbicross.{name}") is not None


@pytest.mark.parametrize(
    "file",
    [*PAGES, *RESULTS, *(ROOT / "docs/images").glob("*.svg"), *(ROOT / "examples").glob("*.py")],
    ids=lambda file: file.relative_to(ROOT).as_posix(),
)
def test_no_path_of_a_machine(file: Path) -> None:
    assert not ABSOLUTE_PATH.findall(file.read_text(encoding="utf-8"))


def test_pictures_are_small() -> None:
    for picture in (ROOT / "docs/images").iterdir():
        assert picture.stat().st_size < 400_000, picture.name


UNFINISHED = {"derma-teachers"}  # docs/results.md says so


@pytest.mark.parametrize("file", RESULTS, ids=lambda file: file.parent.name)
def test_stored_results_are_whole(file: Path) -> None:
    assert file.stat().st_size < 500_000
    results = json.loads(file.read_text(encoding="utf-8"))
    assert results["complete"] != (file.parent.name in UNFINISHED)
    if "trimmed" not in results:
        rows = [{k: v for k, v in row.items() if not k.startswith("seconds")} for row in results["rows"]]
        assert hashlib.sha256(canonical_json(rows).encode()).hexdigest() == results["rows_sha256"]


def test_every_field_of_the_results_is_explained() -> None:
    page = (ROOT / "docs/concepts.md").read_text(encoding="utf-8").split("## results.json")[1]
    explained = set(re.findall(r"`(\w+)`", page))
    results = json.loads((ROOT / "results/demo/results.json").read_text(encoding="utf-8"))
    row = results["rows"][0]
    missing = (set(results) | set(row) | set(row["clients"][0])) - explained - {"trimmed"}
    assert not missing


# --- the commands of "Getting started" -------------------------------------------------------------------


def commands() -> list[tuple[str, str]]:
    """(marker, line) of every shell command on the page, in order."""
    page = (ROOT / "docs/getting-started.md").read_text(encoding="utf-8")
    blocks = re.findall(r"(?:<!-- test: ([^>]*?) -->\n)?```bash\n(.*?)```", page, flags=re.DOTALL)
    assert all(marker for marker, _ in blocks), "every shell block says whether a test runs it"
    return [(marker, line) for marker, block in blocks for line in block.strip().splitlines()]


@pytest.mark.slow
def test_getting_started_can_be_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], one_thread: None
) -> None:
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs/getting-started.md").read_text(encoding="utf-8")
    (tmp_path / "run.toml").write_text(re.findall(r"```toml\n(.*?)```", page, flags=re.DOTALL)[0], encoding="utf-8")
    draw_photos(tmp_path / "photos")
    ran = 0
    for marker, line in commands():
        if marker.startswith("not run"):
            continue
        assert marker == "run" or marker.startswith("run, adding: ")
        words = shlex.split(line) + shlex.split(marker.partition("adding: ")[2])
        assert words[0] == "fedbicross"
        monkeypatch.setattr(sys, "argv", words)
        with pytest.raises(SystemExit) as end:
            main()
        assert not end.value.code, f"{line}: {capsys.readouterr().err}"
        ran += 1
    assert ran >= 8
    assert (tmp_path / "runs/first/report.html").exists()
    assert (tmp_path / "grid.png").exists()


def draw_photos(folder: Path) -> None:
    """Forty small images in class folders, and a manifest that names their patients and sites."""
    rng = np.random.default_rng(0)
    lines = ["path,label,patient_id,site"]
    for label, level in (("benign", 80), ("malignant", 160)):
        (folder / label).mkdir(parents=True)
        for number in range(20):
            pixels = rng.normal(level, 30, (30, 36, 3)).clip(0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / label / f"{number:03d}.png")
            site = "north" if number < 12 else "south"
            lines.append(f"{label}/{number:03d}.png,{label},{label}-{number // 2},{site}")
    (folder / "images.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")


def build_site(root: Path, out: Path) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-c", "docs", ".", str(out)]
    return subprocess.run(words, cwd=root, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_the_site_is_built_without_a_warning_and_holds_together(tmp_path: Path) -> None:
    done = build_site(ROOT, tmp_path)  # a link that Sphinx cannot follow is a warning, and -W makes it an error
    assert done.returncode == 0, done.stderr
    for source in [*PAGES[1:], ROOT / "CONTRIBUTING.md"]:
        assert (tmp_path / source.relative_to(ROOT).with_suffix(".html")).is_file(), source
    for page in tmp_path.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        assert not re.findall(r'<(?:script|link|img|iframe)[^>]+(?:src|href)="https?:', text), "needs the network"
        for link in re.findall(r'(?:href|src)="([^"]+)"', text):
            if not link.startswith(("http", "mailto:", "#", "data:")):
                assert (page.parent / unquote(re.split("[?#]", link)[0])).exists(), f"{page.name}: {link}"
    interface = (tmp_path / "docs/api.html").read_text(encoding="utf-8")
    for name in ("run", "methods.base.Method.fuse", "simulate"):
        assert f'id="fedbicross.{name}"' in interface, name


@pytest.mark.slow
def test_a_link_that_leads_nowhere_breaks_the_site(tmp_path: Path) -> None:
    for name in ("docs/conf.py", "docs/_site/index.html", "docs/_static/tables.css"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "docs/index.md").write_text("# Start\n\n[gone](gone.md) [no heading](index.md#gone)\n")
    done = build_site(tmp_path, tmp_path / "site")
    assert done.returncode == 1
    assert "not found: 'gone.md'" in done.stderr and "local id not found in doc 'docs/index': 'gone'" in done.stderr
