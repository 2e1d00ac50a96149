from typing import Any

import numpy as np
from numpy.typing import NDArray

from cupyfa.emulator.program import Program

HAZARDS: tuple[str, ...]
LISTS: dict[str, dict[str, int]]
VECTOR_UNIT: str

class Code:
    def __init__(self, program: Program) -> None: ...

def run(
    code: Code,
    buffers: list[tuple[int, NDArray[np.uint8], bool, bool, bool, str]],
    params: bytes,
    grid: tuple[int, int, int],
    block: tuple[int, int, int],
    cluster: tuple[int, int, int],
    shared_bytes: int,
    policy: dict[str, Any],
    options: dict[str, Any],
) -> tuple[list[tuple[Any, ...]], dict[str, Any], list[tuple[int, int, int, int, int, int, int]]]: ...
