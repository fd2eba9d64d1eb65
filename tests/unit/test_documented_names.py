"""Files, modules, functions and headings that the documentation names exist."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from tests.end_to_end.command import ROOT

PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")]
PAGES += [ROOT / "examples" / "slurm" / "README.md", ROOT / "docs" / "upstream" / "README.md"]
PAGES += sorted(page for page in (ROOT / "docs").glob("*.md") if page.name != "LOG.md")
PAGES += sorted((ROOT / "docs" / "tutorials").glob("*.md"))
FOLDERS = ("benchmarks", "docs", "examples", "megatron", "tests", "tools")
PACKAGES = {path.stem for path in (ROOT / "megatron").iterdir() if path.name != "__pycache__"}
FILE_ENDINGS = {"bin", "idx", "json", "log", "md", "py", "safetensors", "sha256", "sh", "slurm"}
# Files of other programs, files that the examples of CONTRIBUTING.md add, and a key of GPT-NeoX.
ELSEWHERE = {
    "CONTRIBUTING.md": {
        *("megatron/model/scale_norm.py", "megatron/checkpoint/formats/single_file.py"),
        "megatron/tokenizer/byte_level.py",
    },
    "migration.md": {"tools/ckpts/convert_neox_to_hf.py", "optimizer.params.lr"},
}


def prose_of(text: str) -> str:
    """Returns a page without its fenced blocks."""
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def code_spans(page: Path) -> set[str]:
    """Returns the first word of each code span, without a call's parentheses. Words in `ELSEWHERE` are left
    out."""
    spans = filter(str.split, re.findall(r"`([^`]+)`", prose_of(page.read_text())))
    return {span.split()[0].removesuffix("()") for span in spans} - ELSEWHERE.get(page.name, set())


def has_path(path: str) -> bool:
    """Returns whether a path exists in the repository or in the package."""
    return any((folder / path).exists() for folder in (ROOT, ROOT / "megatron"))


def has_name(name: str) -> bool:
    """Returns whether a dotted name is a module of the repository, or an attribute or field of one."""
    parts = name.split(".")
    if parts[0] not in FOLDERS:
        parts = ["megatron", *parts]
    for count in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for part in parts[count:]:
            if part in getattr(found, "__annotations__", {}) and not hasattr(found, part):
                return part == parts[-1]
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True
    return False


def anchors_of(text: str) -> set[str]:
    """Returns the anchors of a page's headings, as GitHub and mkdocs make them."""
    titles = re.findall(r"^#+ (.*)$", prose_of(text), re.MULTILINE)
    return {re.sub(r"[^\w\s-]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_names_only_what_exists(page: Path) -> None:
    spans = code_spans(page)
    paths = {
        span
        for span in spans
        if re.fullmatch(r"[\w.-]+(/[\w.-]+)*/?", span)
        and "/" in span
        and (span.split("/")[0] in FOLDERS or (span.split("/")[0] in PACKAGES and span.endswith(".py")))
    }
    names = {
        span
        for span in spans
        if re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", span)
        and span.split(".")[0] in PACKAGES | set(FOLDERS)
        and span.rsplit(".", 1)[1] not in FILE_ENDINGS
    }
    missing = [path for path in paths if not has_path(path)] + [name for name in names if not has_name(name)]
    assert not missing, f"{page.name} names what does not exist: {', '.join(sorted(missing))}"


@pytest.mark.parametrize(
    "page", [*PAGES, ROOT / "docs" / "LOG.md"], ids=lambda page: str(page.relative_to(ROOT))
)
def test_a_link_finds_its_file_and_its_heading(page: Path) -> None:
    for link, anchor in re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]+))?\)", prose_of(page.read_text())):
        target = page.parent / link if link else page
        assert target.exists(), f"{page.name} links to {link}"
        if anchor:
            assert anchor in anchors_of(target.read_text()), f"{page.name} links to {link}#{anchor}"


def test_missing_names_are_found() -> None:
    assert has_path("mpu/layers.py") and not has_path("mpu/no_layers.py")
    assert has_name("data.loader.MicroBatch.tokens") and has_name("megatron.mpu.mesh")
    assert not has_name("data.loader.MicroBatch.no_tokens") and not has_name("data.no_loader")
    assert anchors_of("# A `mp_rank_*` file?\n\n```\n# no heading\n```\n") == {"a-mp_rank_-file"}
