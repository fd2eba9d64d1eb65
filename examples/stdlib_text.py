"""Writes the sources of Python's standard library as jsonl, one file per line, as text for the examples.

python examples/stdlib_text.py OUTPUT MAX_FILES
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import sysconfig
from pathlib import Path

EXCLUDED_FOLDERS = {
    *("test", "tests", "idlelib", "lib2to3", "encodings", "pydoc_data", "turtledemo", "ensurepip"),
    *("site-packages", "dist-packages", "__pycache__"),
}


def main(output: str, max_files: int) -> None:
    """Writes the file `output` completely, or not at all."""
    library = Path(sysconfig.get_path("stdlib"))
    files = [
        file for file in library.rglob("*.py") if not EXCLUDED_FOLDERS & set(file.relative_to(library).parts)
    ]
    # Sorting by a hash mixes the packages, so that training and validation data are similar and reproducible.
    files.sort(key=lambda file: hashlib.sha256(file.relative_to(library).as_posix().encode()).digest())
    with open(output + ".tmp", "w") as jsonl:
        for file in files[:max_files]:
            jsonl.write(json.dumps({"text": file.read_text("utf-8", errors="replace")}) + "\n")
    os.replace(output + ".tmp", output)
    print(f"{output}: {len(files[:max_files])} files, {os.path.getsize(output) / 1e6:.1f} MB")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
