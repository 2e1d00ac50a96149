"""What is installed: the version, the device sources, the modules, and what an import pulls in."""

from __future__ import annotations

import doctest
import importlib
import importlib.metadata
import importlib.resources
import importlib.util
import re
import subprocess
import sys
from importlib.resources.abc import Traversable
from pathlib import Path

import pytest

import cupyfa

ROOT = Path(__file__).resolve().parent.parent


def modules() -> list[str]:
    """Dotted names of the package's modules, from the source tree."""
    paths = sorted((ROOT / "cupyfa").rglob("*.py"))
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths]
    return [name.removesuffix(".__init__") for name in names]


def files_below(folder: Traversable) -> dict[str, bytes]:
    """Relative name and content of every file in a resource folder, read one file at a time."""
    found: dict[str, bytes] = {}
    for entry in folder.iterdir():
        if entry.is_dir():
            found |= {f"{entry.name}/{name}": content for name, content in files_below(entry).items()}
        else:
            found[entry.name] = entry.read_bytes()
    return found


def run_python(code: str) -> str:
    """What a new interpreter, outside the source tree, prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd="/")
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_version_is_the_one_in_meson_build() -> None:
    match = re.search(r"^  version: '([^']+)',$", (ROOT / "meson.build").read_text(encoding="utf-8"), re.MULTILINE)
    assert match is not None
    assert cupyfa.__version__ == match[1]


def test_version_is_the_one_of_the_distribution() -> None:
    try:
        version = importlib.metadata.version("cupyfa")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("built by meson alone, which writes no distribution metadata")
    assert cupyfa.__version__ == version


def test_one_device_source_can_be_read() -> None:
    source = importlib.resources.files("cupyfa") / "_cuda" / "hopper" / "fwd.cu"
    assert source.read_text(encoding="utf-8") == (ROOT / "cuda" / "hopper" / "fwd.cu").read_text(encoding="utf-8")


def test_every_device_source_is_installed() -> None:
    in_tree = {
        path.relative_to(ROOT / "cuda").as_posix(): path.read_bytes()
        for path in (ROOT / "cuda").rglob("*")
        if path.is_file()
    }
    assert files_below(importlib.resources.files("cupyfa") / "_cuda") == in_tree


@pytest.mark.parametrize("name", modules())
def test_every_module_is_installed_and_its_examples_hold(name: str) -> None:
    if name.endswith("__main__"):
        assert importlib.util.find_spec(name) is not None
        return
    result = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert result.failed == 0


def test_types_are_declared() -> None:
    package = importlib.resources.files("cupyfa")
    assert (package / "py.typed").is_file()
    assert (package / "_launch.pyi").is_file()


@pytest.mark.parametrize("module", ["cupyfa", "cupyfa.__main__"])
def test_import_needs_no_cupy_and_no_framework(module: str) -> None:
    heavy = {"cupy", "cupyx", "cuda", "torch", "jax", "matplotlib", "tqdm"}
    code = f"import sys, {module}; print(sorted({heavy!r} & {{name.split('.')[0] for name in sys.modules}}))"
    assert run_python(code) == "[]"


def test_import_leaves_the_commands_out() -> None:
    commands = ("cupyfa.__main__", "cupyfa.bench", "cupyfa.emulate_command")
    code = f"import sys, cupyfa; print([name for name in sys.modules if name.startswith({commands!r})])"
    assert run_python(code) == "[]"


def test_import_brings_no_oracle_that_the_library_does_not_need() -> None:
    code = "import sys, cupyfa; print(sorted(name for name in sys.modules if name.startswith('cupyfa.oracles.')))"
    names = ["backward", "dense", "jacobian", "kvcache", "logits", "mask", "online", "packed", "packed_backward"]
    names += ["rotary", "score_mod", "softmax", "violations"]
    assert run_python(code) == str([f"cupyfa.oracles.{name}" for name in names])


def test_import_loads_no_driver() -> None:
    code = "import cupyfa; print([line for line in open('/proc/self/maps') if 'libcuda' in line or 'libnvrtc' in line])"
    assert run_python(code) == "[]"
