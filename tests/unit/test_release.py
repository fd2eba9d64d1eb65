"""The metadata of a release agree, and the steps of the release workflow are commands that exist."""

from __future__ import annotations

import os
import re
import subprocess
from typing import Any

import pytest
import yaml

from megatron import __version__
from tests.end_to_end.command import ROOT
from tests.support.make import make

WORKFLOW: dict[str, Any] = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())
BUILD: list[dict[str, Any]] = WORKFLOW["jobs"]["build"]["steps"]
CITATION: dict[str, Any] = yaml.safe_load((ROOT / "CITATION.cff").read_text())


def newest_release() -> tuple[str, str]:
    """Returns the version and the date of the newest release in the changelog."""
    headings = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    version, _, date = next(heading for heading in headings if heading != "Unreleased").partition(" - ")
    return version, date


def test_the_citation_names_the_version_and_the_date_of_the_changelog() -> None:
    assert (CITATION["version"], CITATION["date-released"]) == newest_release()
    assert CITATION["version"] == __version__


def test_the_citation_is_valid() -> None:
    """Checks the keys and the values that the schema of CFF 1.2.0 requires or restricts."""
    required = {"cff-version", "message", "title", "authors"}
    optional = {"abstract", "type", "version", "date-released", "license", "keywords"}
    assert required <= CITATION.keys() <= required | optional
    assert CITATION["cff-version"] == "1.2.0" and CITATION["type"] == "software"
    assert all(author.keys() == {"name"} for author in CITATION["authors"])
    assert re.fullmatch(r"\d{4}-\d{2}-\d{2}", CITATION["date-released"])
    assert all(isinstance(word, str) for word in CITATION["keywords"])


def test_pages_and_scripts_install_the_distribution_by_its_name() -> None:
    pages = [
        ROOT / "README.md",
        ROOT / "Dockerfile",
        ROOT / "CONTRIBUTING.md",
        *(ROOT / "docs").rglob("*.md"),
    ]
    pages += [*(ROOT / "examples").rglob("*.*"), *(ROOT / ".ci").iterdir()]
    log = ROOT / "docs" / "LOG.md"
    old = [page for page in pages if page != log and "megatron-gpt-pretraining" in page.read_text()]
    assert not old, "the distribution is called paritron"


def test_the_workflow_publishes_only_what_a_tag_has_built() -> None:
    # YAML 1.1 reads the key `on` as true.
    assert WORKFLOW[True] == {"push": {"tags": ["v*"]}}
    jobs = WORKFLOW["jobs"]
    assert jobs["pypi"]["needs"] == jobs["pages"]["needs"] == "build"
    assert jobs["pypi"]["environment"] == "pypi" and jobs["pypi"]["permissions"] == {"id-token": "write"}
    assert jobs["pypi"]["steps"][-1]["uses"].startswith("pypa/gh-action-pypi-publish@")
    (built,) = (step["with"]["path"] for step in BUILD if "upload-artifact" in step.get("uses", ""))
    assert built == jobs["pypi"]["steps"][0]["with"]["path"] == "dist/"
    (site,) = (step["with"]["path"] for step in BUILD if "upload-pages-artifact" in step.get("uses", ""))
    assert site == "site/"


def test_the_workflow_runs_targets_of_the_makefile() -> None:
    commands = [step["run"] for step in BUILD if step.get("run", "").startswith("make ")]
    assert commands == ["make dist site EXTRAS=dev"]
    printed = make("--dry-run", *commands[0].split()[1:])
    assert 'build_sdist("dist")' in printed and "mkdocs build --strict" in printed


@pytest.mark.parametrize(
    ("tag", "code"), [(f"v{__version__}", 0), (__version__, 1), ("v9.9.9", 1), (f"v{__version__}1", 1)]
)
def test_a_tag_that_is_not_the_version_ends_the_workflow(tag: str, code: int) -> None:
    (step,) = (step for step in BUILD if step.get("name") == "the tag is the version")
    done = subprocess.run(
        ["bash", "-e", "-c", step["run"]],
        cwd=ROOT,
        env={**os.environ, "GITHUB_REF_NAME": tag},
        capture_output=True,
        text=True,
    )
    assert done.returncode == code
    assert (f"error: tag {tag}: expected v{__version__}," in done.stderr) == bool(code)
