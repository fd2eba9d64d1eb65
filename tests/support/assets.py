"""The archives in tests/assets."""

import tarfile
from pathlib import Path

ASSETS = Path(__file__).parents[1] / "assets"


def unpack(name: str, folder: Path) -> Path:
    """Unpacks the archive `name` into a folder. Returns the subfolder with the archive's name."""
    with tarfile.open(ASSETS / f"{name}.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    return folder / name
