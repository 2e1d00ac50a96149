"""Device sources as one text.

CuPy's cache key is the text that it compiles: a file that is only ``#include``d is invisible to it, and an edited
header would silently run the old kernel. So an entry file and everything that it includes become one text here, with
``#line`` marks that keep compiler messages pointing at the real files.
"""

from __future__ import annotations

import functools
import importlib.resources
import re

__all__ = ["amalgamate", "read"]

_INCLUDE = re.compile(r'\s*#\s*include\s+"([^"]+)"')
_ONCE = re.compile(r"\s*#\s*pragma\s+once")


def read(path: str) -> str:
    """Return the text of one file of ``cuda/``.

    Parameters
    ----------
    path : str
        Relative to ``cuda/``, for example ``"hopper/fwd.cu"``.
    """
    file = importlib.resources.files("cupyfa").joinpath("_cuda", *path.split("/"))
    return file.read_text(encoding="utf-8")


@functools.cache
def amalgamate(entry: str) -> str:
    """Return an entry file with its includes in place, each file once.

    Parameters
    ----------
    entry : str
        Relative to ``cuda/``. Includes are relative to ``cuda/`` as well.

    Returns
    -------
    str
        Text that needs no other file.

    Examples
    --------
    >>> text = amalgamate("hopper/fwd.cu")
    >>> '#include "' in text
    False
    >>> text.splitlines()[0]
    '#line 1 "cuda/hopper/fwd.cu"'
    """
    lines: list[str] = []
    seen: set[str] = set()

    def insert(path: str) -> None:
        seen.add(path)
        lines.append(f'#line 1 "cuda/{path}"')
        for number, line in enumerate(read(path).splitlines(), start=1):
            include = _INCLUDE.match(line)
            if include and include[1] not in seen:
                insert(include[1])
            if include or _ONCE.match(line):
                lines.append(f'#line {number + 1} "cuda/{path}"')
            else:
                lines.append(line)

    insert(entry)
    return "\n".join(lines) + "\n"
