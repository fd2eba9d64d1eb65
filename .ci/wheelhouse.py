"""Collects the wheels that a node without a network needs beside its own PyTorch (make wheelhouse).

pip resolves the requirements of this package for the node's Python and downloads them. Empty wheels replace
torch and triton, so that pip downloads neither these nor CUDA; `--torch` downloads them too. Needs only pip.
"""

import argparse
import os
import platform
import re
import runpy
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CONSTRAINTS = ROOT / "constraints.txt"
# PyPI has no wheels of these packages: package -> the extra that needs it.
SOURCES = {"deepspeed": None, "rouge-score": "eval", "sqlitedict": "eval", "word2number": "eval"}
# The newest glibc that a wheel may need, 2.28, is the one that PyTorch's wheels need.
MAX_GLIBC_MINOR = 28


def write_empty_wheel(folder: Path, name: str, version: str) -> None:
    """Writes a wheel of a package that has no files and requires nothing."""
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python-version", default="{}.{}".format(*sys.version_info), help="3.12")
    parser.add_argument("--machine", default="x86_64", help="x86_64 or aarch64")
    parser.add_argument("--extras", default="", help="of pyproject.toml, separated by commas")
    parser.add_argument("--torch", action="store_true")
    args = parser.parse_args()
    if not re.fullmatch(r"3\.\d+", args.python_version):
        parser.error(f"PYTHON_VERSION {args.python_version}: expected a version such as 3.12")
    with tempfile.TemporaryDirectory() as temporary:
        local = Path(temporary)
        for name in () if args.torch else ("torch", "triton"):
            pinned = re.search(rf"^{name}==([\d.]+)", CONSTRAINTS.read_text(), re.MULTILINE)
            # A local version is newer than the release.
            write_empty_wheel(local, name, f"{pinned[1] if pinned else '0'}+node")
        extras = {None, *args.extras.split(",")}
        sources = [name for name, extra in SOURCES.items() if extra in extras]
        common = ["--constraint", str(CONSTRAINTS), "--disable-pip-version-check", "--quiet"]
        build = ["pip", "wheel", *common, "--no-deps", "--wheel-dir", temporary, *sources]
        subprocess.run([sys.executable, "-m", *build], check=True, env={**os.environ, "DS_BUILD_OPS": "0"})
        sys.argv = ["pip", "download", *common, "--find-links", temporary, "--dest", str(args.folder)]
        sys.argv += ["--only-binary=:all:", "--python-version", args.python_version]
        for minor in range(MAX_GLIBC_MINOR, 4, -1):
            sys.argv += ["--platform", f"manylinux_2_{minor}_{args.machine}"]
        for name in ("manylinux2014", "linux"):
            sys.argv += ["--platform", f"{name}_{args.machine}"]
        sys.argv += ["setuptools", "wheel", f"{ROOT}[{args.extras}]"]
        # pip evaluates markers (python_version < "3.12") for its own Python: it gets the node's values.
        platform.python_version = lambda: f"{args.python_version}.0"
        platform.python_version_tuple = lambda: (*args.python_version.split("."), "0")
        platform.machine = lambda: args.machine
        try:
            runpy.run_module("pip", run_name="__main__")
        except SystemExit as end:
            if end.code:
                raise
    wheels = [path for path in args.folder.glob("*.whl") if "+node" not in path.name]
    for path in {*args.folder.glob("*.whl")} - {*wheels}:
        path.unlink()
    size = sum(path.stat().st_size for path in wheels)
    print(f"{args.folder}: {len(wheels)} wheels, {size / 1e6:.0f} MB, for Python {args.python_version}")


if __name__ == "__main__":
    main()
