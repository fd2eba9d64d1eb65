"""The documents of the task `toy`: beginnings of Python code, each with four continuations. The first
continuation is right."""

from typing import Any

from datasets import Dataset

_DOCUMENTS = {
    "import os\nimport": (" sys\n", ")\n", " == 1\n", " else:\n"),
    "def main(": ("):\n", " import", "class ", " while"),
    "for i in": (" range(10):\n", " def f():\n", " return\n", " import os\n"),
    "class Queue:\n    def __init__": ("(self", " import", " = 3", "[0]"),
    "if x is not": (" None:\n", " class\n", " import\n", " def\n"),
    "try:\n    pass\nexcept": (" ValueError:\n", " = 1\n", " + 2\n", "(]\n"),
    "    return self": (".name\n", " def", " class", " import"),
    "while": (" True:\n", ")]\n", " = \n", "): import\n"),
    'if __name__ == "__main__":\n   ': (" main()\n", " ]\n", " )\n", " }\n"),
    "from collections import": (" deque\n", " = 0\n", ":\n", " + 1\n"),
    "x = [": ("1, 2, 3]\n", "def\n", "class\n", "return\n"),
    "with open(path) as": (" file:\n", " 1\n", " (\n", " ==\n"),
}


def documents(**_: Any) -> dict[str, Dataset]:
    """Returns split -> documents. The position of the right answer changes from one document to the next."""
    rows = []
    for index, (text, choices) in enumerate(_DOCUMENTS.items()):
        answer = index % len(choices)
        wrong = list(choices[1:])
        rows.append(
            {"text": text, "choices": [*wrong[:answer], choices[0], *wrong[answer:]], "answer": answer}
        )
    return {"test": Dataset.from_list(rows)}
