# SPDX-License-Identifier: Apache-2.0
"""The list of what does not match between a file and the objects to restore."""

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any

from fabric.utilities.types import PathLike

_MOST_LINES = 60
# Looking for the nearest name among many thousands takes long, and nobody reads that far.
_MOST_HINTS = 50
_MOST_COMPARED = 5000


class Differences:
    """Collects differences and raises them as one error."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._hints = 0
        self._compared = 0

    def missing(self, where: str, key: Any, content: Iterable[Any]) -> None:
        """A key of the user's that the file has not."""
        self._add("missing", where, self._nearest(key, content, "the nearest in the file is"))

    def names(self, where: str, missing: Sequence[str], unexpected: Sequence[str]) -> None:
        """Names of a module that the file has not, and the other way round."""
        for name in missing:
            hint = self._nearest(name, unexpected, "the nearest in the file is")
            self._add("missing", f"{where}: {name}", hint)
        for name in unexpected:
            hint = self._nearest(name, missing, "the nearest in the module is")
            self._add("unexpected", f"{where}: {name}", hint)

    def mismatched(self, where: str, in_file: str, here: str, name: str = "") -> None:
        """Something that is there twice and can't be the same."""
        self._add("mismatched", f"{where}: {name}" if name else where, f": {in_file}, {here}")

    def raise_if_any(self, path: PathLike) -> None:
        """Raise one `RuntimeError` that lists all of them; of very many the first ones, and how many more there are."""
        if not self._lines:
            return
        lines = "\n".join(self._lines[:_MOST_LINES])
        more = Counter(line.split(maxsplit=1)[0] for line in self._lines[_MOST_LINES:])
        if more:
            lines += f"\n  ... and {', '.join(f'{count} more {kind}' for kind, count in more.items())}"
        advice = ""
        if any(not line.startswith("  mismatched") for line in self._lines):
            advice = "\nTo skip what is missing or unexpected, pass `strict=False`."
        raise RuntimeError(
            f"`{os.fspath(path)}` does not match what is to be restored. Nothing was changed.\n{lines}{advice}"
        )

    def _add(self, kind: str, where: str, detail: str) -> None:
        self._lines.append(f"  {kind:<11} {where}{detail}")

    def _nearest(self, name: Any, choices: Iterable[Any], text: str) -> str:
        if self._hints >= _MOST_HINTS or self._compared >= _MOST_COMPARED:
            return ""
        names = [str(choice) for choice in choices]
        self._hints += 1
        self._compared += len(names)
        near = get_close_matches(str(name), names, n=1) if len(names) <= _MOST_COMPARED else []
        return f" ({text} {near[0]!r})" if near else ""
