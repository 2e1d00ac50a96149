"""The layers point down only: Python imports, #include lines, and asm in cuda/ptx/ alone."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# What a module of cupyfa may import directly; it may then also import whatever that may import. A package (oracles)
# stands for its modules, which may import each other. __init__ gathers the public names and may
# import everything but COMMANDS.
PYTHON_LAYERS: dict[str, set[str]] = {
    "errors": set(),
    "_version": set(),
    "oracles": set(),
    "spec_template": set(),
    "backward_spec": {"spec_template"},
    "spec": {"backward_spec", "errors", "spec_template"},
    "operand": set(),
    "options": {"errors", "operand"},
    "checks": {"errors", "operand", "options", "spec"},
    "libraries": {"errors", "operand"},
    "packed": {"errors", "operand", "options"},
    "problem": {"checks", "packed"},
    "candidates": {"problem"},
    "select": {"candidates"},
    "sources": {"errors"},
    "compiler": {"sources", "spec"},
    "_launch": {"errors"},
    "kernels": {"compiler", "_launch"},
    "scales": set(),
    "schedule": {"problem", "select"},
    "debug": set(),
    "lengths": {"problem"},
    "copies": {"problem"},
    "packing": {"problem", "select", "_launch"},
    "plan": {"packing", "problem", "scales", "schedule", "select", "_launch"},
    "emulator": {"errors"},
    "emulate_stage": {"emulator", "errors", "spec", "_launch"},
    "emulate": {"compiler", "copies", "emulate_stage", "emulator", "plan", "_launch"},
    "dispatch": {"copies", "debug", "emulate", "kernels", "lengths", "libraries", "oracles", "plan", "_launch"},
    "cache_options": {"options"},
    "cache_checks": {"cache_options", "checks"},
    "cache_problem": {"cache_checks"},
    "cache_values": {"cache_problem"},
    "decode_select": {"cache_problem", "select"},
    "_decode": set(),
    "decode_plan": {"decode_select", "scales", "_decode", "_launch"},
    "emulate_cache": {"cache_values", "decode_plan", "emulate", "emulate_stage"},
    "decode_dispatch": {"cache_values", "debug", "emulate_cache", "kernels", "libraries", "oracles"},
    "kvcache": {"attention", "decode_dispatch"},
    "cache_shapes": {"decode_plan"},
    "explain_cache": {"decode_dispatch", "explained"},
    "merge": {"attention"},
    "paging": {"errors"},
    "attention": {"dispatch"},
    "varlen": {"attention"},
    "backward_problem": {"problem"},
    "backward_select": {"backward_problem", "select"},
    "_backward": set(),
    "backward_bias": {"backward_problem", "copies", "_backward", "_launch"},
    "backward_launches": {"backward_problem", "packing", "_backward", "_launch"},
    "backward_plan": {"backward_bias", "backward_launches", "backward_select", "copies"},
    "emulate_backward": {"backward_plan", "emulate", "emulate_stage"},
    "backward_dispatch": {"debug", "emulate_backward", "kernels", "lengths", "libraries", "oracles"},
    "backward": {"backward_dispatch", "dispatch"},
    "varlen_backward": {"backward"},
    "vjp": {"backward", "varlen", "varlen_backward"},
    "workspace": {"backward_dispatch", "dispatch"},
    "testing": {"oracles", "spec"},
    "explain": {"dispatch"},
    "explained": {"explain"},
    "explain_backward": {"backward_dispatch", "explained"},
    "support": {"select"},
    "call_shapes": {"options"},
    "backward_shapes": {"backward_plan", "call_shapes"},
    "warmup": {"backward_shapes", "cache_shapes", "kernels", "select"},
    "emulate_command": {"emulate", "testing"},
    "bench": {"__init__", "backward_dispatch", "emulate", "testing"},
    "__main__": {"__init__", "bench", "emulate_command", "explain", "support", "testing"},
}

# Behind `python -m cupyfa`; nothing but __main__ imports them.
COMMANDS = {"__main__", "bench", "emulate_command"}

# What a module may import from outside, beside the standard library, at any depth.
OUTSIDE = {"numpy", "scipy", "ml_dtypes", "cupy", "cuda"}
OUTSIDE_OF: dict[str, set[str]] = {
    "bench": {"numpy", "ml_dtypes", "tqdm", "cupy"},
    "oracles": {"numpy", "scipy"},
    "spec": set(),
    "errors": set(),
    "sources": set(),
    "warmup": {"tqdm", "cupy"},
}
STANDARD = sys.stdlib_module_names | {"libc", "libcpp", "cpython", "cython"}

# Only inside functions (or for a type checker): `import cupyfa` needs none of these.
LAZY = {"cupy", "cupyx", "cupy_backends", "cuda", "matplotlib", "torch", "tqdm"}

# What a device file may include. Groups are those of `device_group`; the table is complete, not closed.
DEVICE_LAYERS: dict[str, set[str]] = {
    "params": {"params"},
    "spec": set(),
    "ptx": {"ptx", "spec", "params"},
    "shared": {"shared", "ptx", "spec", "params"},
    "shared entry": {"shared", "ptx", "spec", "params"},
    "hopper": {"hopper", "shared", "ptx", "spec", "params"},
    "hopper entry": {"hopper", "shared", "ptx", "spec", "params"},
    "blackwell": {"blackwell", "shared", "ptx", "spec", "params"},
    "blackwell entry": {"blackwell", "shared", "ptx", "spec", "params"},
}

# Roles of one kernel: they meet in storage.cuh and never include each other.
ROLES: dict[str, set[str]] = {
    "hopper": {"producer.cuh", "consumer.cuh", "storer.cuh"},
    "blackwell": {"load.cuh", "mma.cuh", "softmax.cuh", "correction.cuh", "epilogue.cuh"},
}

COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
INCLUDE = re.compile(r"^[ \t]*#[ \t]*include\b[ \t]*(.*?)[ \t]*$", re.MULTILINE)
ASM = re.compile(r"\b(?:asm|__asm|__asm__)\b")


# --- Python ---


def closure(layers: Mapping[str, set[str]], name: str) -> set[str]:
    """Everything below `name`."""
    below: set[str] = set()
    todo = list(layers[name])
    while todo:
        layer = todo.pop()
        if layer not in below:
            below.add(layer)
            todo.extend(layers.get(layer, ()))
    return below


def unit_of(package: Path, path: Path) -> str:
    """The row of the table that a file belongs to: its module, or the subpackage it lies in."""
    first = path.relative_to(package).parts[0]
    return first.removesuffix(".py").removesuffix(".pyx")


def imports(package: Path, path: Path, tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and absolute dotted name of every import; `from x import y` gives x.y where y is a module of the package."""
    here = ("cupyfa", *path.relative_to(package).parent.parts)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = [*here[: len(here) - node.level + 1]] if node.level else []
            base += node.module.split(".") if node.module else []
            for alias in node.names:
                inside = package.joinpath(*base[1:], alias.name)
                is_module = base[0] == "cupyfa" and (
                    inside.is_dir() or any(inside.with_suffix(s).is_file() for s in (".py", ".pyx"))
                )
                yield node.lineno, ".".join([*base, alias.name] if is_module else base)


def eager_imports(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and top-level name of the imports that run when the module is imported."""
    todo: list[ast.AST] = list(tree.body)
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name.split(".")[0]) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            yield node.lineno, node.module.split(".")[0]
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            todo.extend(node.orelse)
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.expr):
            todo.extend(ast.iter_child_nodes(node))


def cython_imports(text: str) -> ast.Module:
    """The import lines of a .pyx file, at their line numbers."""
    kept = [line.strip().replace(" cimport ", " import ") if re.match(r"\s*(from|import)\s", line) else ""
            for line in text.split("\n")]  # fmt: skip
    return ast.parse("\n".join(kept))


def python_violations(package: Path) -> list[str]:
    """Every import in `package` that the tables above do not allow."""
    found = []
    for path in sorted([*package.rglob("*.py"), *package.rglob("*.pyx")]):
        text = path.read_text(encoding="utf-8")
        tree = cython_imports(text) if path.suffix == ".pyx" else ast.parse(text)
        unit, where = unit_of(package, path), path.relative_to(package.parent)
        if unit == "__init__":
            below = set(PYTHON_LAYERS) - COMMANDS
        elif unit in PYTHON_LAYERS:
            below = closure(PYTHON_LAYERS, unit)
        else:
            found.append(f"{where}: no layer is named {unit}; add it to PYTHON_LAYERS")
            continue
        for line, name in imports(package, path, tree):
            top, *rest = name.split(".")
            target = rest[0] if rest else "__init__"
            if top == "cupyfa":
                if target != unit and target not in below:
                    found.append(f"{where}:{line}: {unit} imports {target}, which is not below it")
            elif top not in OUTSIDE_OF.get(unit, OUTSIDE) | STANDARD:
                found.append(f"{where}:{line}: {unit} imports {top}")
        found += [
            f"{where}:{line}: {top} is imported before it is needed" for line, top in eager_imports(tree) if top in LAZY
        ]
    return found


# --- CUDA ---


def device_group(path: Path) -> str | None:
    """The row of DEVICE_LAYERS for a path relative to cuda/; None for a place where no device file belongs."""
    match path.parts:
        case ["params.h" | "bwd_params.h" | "decode_params.h"]:
            return "params"
        case ["spec.cuh"]:
            return "spec"
        case [name] if name.endswith(".cuh"):
            return "shared"
        case [name] if name.endswith(".cu"):
            return "shared entry"
        case ["ptx", name] if name.endswith(".cuh"):
            return "ptx"
        case [("hopper" | "blackwell") as arch, name] if name.endswith(".cuh"):
            return arch
        case [("hopper" | "blackwell") as arch, _, name] if name.endswith(".cuh"):  # a kernel with files of its own
            return arch
        case [("hopper" | "blackwell") as arch, name] if name.endswith(".cu"):
            return f"{arch} entry"
    return None


def blank_comments(text: str) -> str:
    """The text without comments, its lines kept."""
    return COMMENT.sub(lambda match: "\n" * match[0].count("\n"), text)


def device_violations(cuda: Path) -> list[str]:
    """Every include and every asm in `cuda` that the tables above do not allow."""
    found = []
    edges: dict[Path, list[Path]] = {}
    for path in sorted(p for p in cuda.rglob("*") if p.is_file()):
        where = path.relative_to(cuda)
        group = device_group(where)
        if group is None:
            found.append(f"{where}: no device file belongs here")
            continue
        text = blank_comments(path.read_text(encoding="utf-8"))
        if group != "ptx":
            found += [f"{where}:{text.count(chr(10), 0, m.start()) + 1}: asm outside ptx/" for m in ASM.finditer(text)]
        for match in INCLUDE.finditer(text):
            mark = f"{where}:{text.count(chr(10), 0, match.start(1)) + 1}"
            name = match[1]
            if not re.fullmatch(r'"[^"]+"', name):
                found.append(f"{mark}: include {name}: only quoted names of files in cuda/")
                continue
            target = Path(name[1:-1])  # relative to cuda/, as sources.amalgamate reads it
            if ".." in target.parts or not (cuda / target).is_file():
                found.append(f"{mark}: {target} does not exist in cuda/")
                continue
            edges.setdefault(where, []).append(target)
            target_group = device_group(target)
            if target_group not in DEVICE_LAYERS[group]:
                found.append(f"{mark}: {group} includes {target} ({target_group}), which is not below it")
            roles = ROLES.get(where.parts[0], set())
            if where.name in roles and target.parent == where.parent and target.name in roles:
                found.append(f"{mark}: role {where.name} includes role {target.name}; they meet in storage.cuh")
    return found + [f"{' > '.join(map(str, cycle))}: include cycle" for cycle in cycles(edges)]


def cycles(edges: Mapping[Path, list[Path]]) -> Iterator[list[Path]]:
    """One cycle for every edge that closes one, by depth-first search."""
    done: set[Path] = set()

    def visit(node: Path, trail: list[Path]) -> Iterator[list[Path]]:
        if node in trail:
            yield [*trail[trail.index(node) :], node]
        elif node not in done:
            for target in edges.get(node, ()):
                yield from visit(target, [*trail, node])
            done.add(node)

    for node in edges:
        yield from visit(node, [])


# --- the tree ---


def test_python_layers() -> None:
    assert python_violations(ROOT / "cupyfa") == []


def test_only_the_command_line_is_above_a_command() -> None:
    above = {name: closure(PYTHON_LAYERS, name) & COMMANDS for name in PYTHON_LAYERS}
    assert {name: below for name, below in above.items() if below} == {"__main__": COMMANDS - {"__main__"}}


def test_device_layers() -> None:
    assert device_violations(ROOT / "cuda") == []


def test_table_has_no_cycle() -> None:
    assert [name for name in PYTHON_LAYERS if name in closure(PYTHON_LAYERS, name)] == []


# --- the test can fail ---


def plant(folder: Path, files: Mapping[str, str]) -> Path:
    """Write a small tree."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder


GOOD_PACKAGE = {
    "__init__.py": "from .attention import attention\n",
    "errors.py": "",
    "spec.py": "from . import errors\n",
    "problem.py": "from cupyfa.spec import FwdSpec\n",
    "attention.py": "from .problem import Problem\n\ndef attention():\n    import cupy\n",
    "kernels.py": "class Kernel:\n    def load(self):\n        if self:\n            import cupy\n",
    "oracles/__init__.py": "from .dense import dense\n",
    "oracles/dense.py": "import math\nimport numpy as np\nfrom . import online\n",
    "oracles/online.py": "",
    "__main__.py": "from cupyfa.bench import forward\n",
    "bench/__init__.py": "",
    "bench/forward.py": "import cupyfa\nfrom cupyfa.bench import peers\n\ndef run():\n    from tqdm import tqdm\n",
    "bench/peers.py": "from cupyfa.emulate import prepare\n",
    "emulate.py": "",
    "_launch.pyx": "from libc.string cimport memcpy\nfrom cupyfa.errors import LaunchError\ncdef int x = 0\n",
}


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("spec.py", "from .problem import Problem\n", "spec imports problem"),
        ("errors.py", "def f():\n    from cupyfa import spec\n", "errors.py:2: errors imports spec"),
        ("problem.py", "import cupyfa.attention\n", "problem imports attention"),
        ("problem.py", "from cupyfa import attention\n", "problem imports attention"),
        ("problem.py", "import cupyfa\n", "problem imports __init__"),
        ("oracles/dense.py", "from ..spec import FwdSpec\n", "oracles imports spec"),
        ("oracles/dense.py", "import ml_dtypes\n", "oracles imports ml_dtypes"),
        ("_launch.pyx", "# first\nfrom .spec cimport x\n", "_launch.pyx:2: _launch imports spec"),
        ("attention.py", "try:\n    import cupy\nexcept ImportError:\n    pass\n", "cupy is imported before"),
        ("kernels.py", "class Kernel:\n    import torch\n", "torch is imported before"),
        ("problem.py", "import jax\n", "problem imports jax"),
        ("problem.py", "def f():\n    import tqdm\n", "problem imports tqdm"),
        ("__init__.py", "from . import bench\n", "__init__ imports bench"),
        ("attention.py", "def f():\n    from cupyfa.bench.peers import enter\n", "attention imports bench"),
        ("emulate_command.py", "from cupyfa.bench import peers\n", "emulate_command imports bench"),
        ("bench/peers.py", "import cupyfa.emulate_command\n", "bench imports emulate_command"),
        ("bench/peers.py", "import tqdm\n", "tqdm is imported before"),
        ("helpers.py", "", "no layer is named helpers"),
    ],
)
def test_planted_import_is_found(tmp_path: Path, name: str, text: str, message: str) -> None:
    package = plant(tmp_path / "cupyfa", GOOD_PACKAGE)
    assert python_violations(package) == []
    plant(package, {name: text})
    assert any(message in violation for violation in python_violations(package))


GOOD_DEVICE = {
    "spec.cuh": "#pragma once\n",
    "params.h": "",
    "ptx/mbarrier.cuh": '#include "spec.cuh"\ninline void f() { asm volatile("nop;"); }\n',
    "ring.cuh": '// no asm, and not "#include <x>"\n#include "ptx/mbarrier.cuh"\n',
    "hopper/storage.cuh": '#include "ring.cuh"\n',
    "hopper/producer.cuh": '#include "hopper/storage.cuh"\n',
    "hopper/consumer.cuh": '#include "hopper/storage.cuh"\n',
    "hopper/fwd.cu": '#include "hopper/producer.cuh"\n#include "hopper/consumer.cuh"\n#include "params.h"\n',
    "decode_params.h": '#include "params.h"\n',
    "hopper/decode/producer.cuh": '#include "decode_params.h"\n#include "hopper/storage.cuh"\n',
    "hopper/decode/consumer.cuh": '#include "hopper/consumer.cuh"\n',
    "blackwell/storage.cuh": '#include "ring.cuh"\n',
}


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("ring.cuh", '#include "hopper/storage.cuh"\n', "shared includes hopper/storage.cuh"),
        ("ptx/mbarrier.cuh", '\n#include "../layout.cuh"\n', "mbarrier.cuh:2: ../layout.cuh does not exist"),
        ("hopper/consumer.cuh", '#include "storage.cuh"\n', "storage.cuh does not exist in cuda/"),
        ("blackwell/storage.cuh", '#include "hopper/storage.cuh"\n', "blackwell includes hopper/storage.cuh"),
        ("hopper/consumer.cuh", '#include "hopper/producer.cuh"\n', "role consumer.cuh includes role producer.cuh"),
        ("hopper/bwd.cu", '#include "hopper/fwd.cu"\n', "hopper entry includes hopper/fwd.cu"),
        ("spec.cuh", '#include "params.h"\n', "spec includes params.h"),
        ("ring.cuh", "#include <cuda_fp16.h>\n", "include <cuda_fp16.h>: only quoted names"),
        ("ring.cuh", 'inline void f() {\n  asm volatile("nop;");\n}\n', "ring.cuh:2: asm outside ptx/"),
        ("ring.cuh", "/* asm */\n__asm__(1);\n", "ring.cuh:2: asm outside ptx/"),
        ("portable/fwd.cu", "", "no device file belongs here"),
        ("hopper/decode/decode.cu", "", "no device file belongs here"),
        ("hopper/decode/parts/merge.cuh", "", "no device file belongs here"),
        (
            "hopper/decode/consumer.cuh",
            '#include "hopper/decode/producer.cuh"\n',
            "consumer.cuh includes role producer",
        ),
        ("hopper/gemm.cuh", '#include "hopper/gemm.cuh"\n', "include cycle"),
    ],
)
def test_planted_include_is_found(tmp_path: Path, name: str, text: str, message: str) -> None:
    cuda = plant(tmp_path / "cuda", GOOD_DEVICE)
    assert device_violations(cuda) == []
    plant(cuda, {name: text})
    assert any(message in violation for violation in device_violations(cuda))
