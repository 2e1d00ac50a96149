"""Compile FlashAttention-4 kernels to PTX on a machine without a GPU (a script, run by the peer test).

    python fa4_dump.py OUTPUT KERNEL [KERNEL ...]

needs `flash-attn-4`, `nvidia-cutlass-dsl` and `torch` in the interpreter that runs it, and nothing of this project. A
kernel is named

    {fwd|bwd}-{bfloat16|float16}-d{head_dim}-{full|causal}-{1cta|2cta}

and becomes `OUTPUT/KERNEL.ptx` and `OUTPUT/KERNEL.json`, which says how to launch it: its entry, block, cluster,
dynamic shared memory, and for each parameter its offset, size, kind, type and, of a forward kernel, its name. One
process compiles for one CTA count only, because the package reads that switch when it is imported. All compilations use
fake tensors: neither a driver nor device memory is touched. The number of multiprocessors below feeds the package's
heuristics and its persistent grid; whoever launches the kernel chooses the grid anew.

The PTX is derived from other people's sources: write it to a temporary folder, never into the repository.
"""

import argparse
import contextlib
import importlib.metadata
import json
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

SMS = 148
NAME = re.compile(r"(fwd|bwd)-(bfloat16|float16)-d(\d+)-(full|causal)-([12])cta")

# What the forward kernels take, one (kind, name) for each parameter, by the tile scheduler that ends the list.
_TENSORS = (
    ("shape", "q_shape"),
    ("shape", "k_shape"),
    ("shape", "v_shape"),
    ("shape", "out_shape"),
    ("tensor", "lse"),
    ("tensor_map", "q_map"),
    ("tensor_map", "k_map"),
    ("tensor_map", "v_map"),
    ("tensor_map", "out_map"),
    ("float32", "scale_log2"),
    ("mma", "unused_qk_mma"),
    ("mma", "unused_pv_mma"),
)
FORWARD_PARAMETERS = {
    "persistent": (
        *_TENSORS,
        ("divisor", "blocks_divisor"),
        ("int32", "blocks"),
        ("divisor", "heads_divisor"),
        ("int32", "heads"),
        ("int32", "tiles"),
        ("int32", "splits"),
    ),
    "longest_first": (
        *_TENSORS,
        ("int32", "tiles"),
        ("int32", "splits"),
        ("int32", "blocks"),
        ("int32", "heads"),
        ("int32", "batch"),
        ("int32", "section"),
        ("divisor", "heads_divisor"),
        ("int32", "heads"),
        ("divisor", "section_divisor"),
        ("int32", "section"),
        ("divisor", "section_blocks_divisor"),
        ("int32", "section_blocks"),
        ("divisor", "residual_divisor"),
        ("int32", "residual"),
        ("int32", "whole_sections"),
        ("divisor", "splits_divisor"),
        ("int32", "splits"),
        ("int32", "splits"),
    ),
}


def main(arguments: list[str]) -> None:
    """Compile every kernel named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("kernels", nargs="+", metavar="KERNEL")
    options = parser.parse_args(arguments)
    fields = {name: NAME.fullmatch(name) for name in options.kernels}
    if wrong := [name for name, match in fields.items() if match is None]:
        parser.error(f"not a kernel's name: {', '.join(wrong)}")
    ctas = {int(match[5]) for match in fields.values()}
    if len(ctas) != 1:
        parser.error("one process compiles for one CTA or for two, not for both")
    options.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        _prepare_environment(scratch, *ctas)
        _stub_hardware()
        for name, match in fields.items():
            _compile(*match.groups()[:4])
            ptx, description = _collect(Path(scratch), match[1], *ctas)
            options.output.joinpath(f"{name}.ptx").write_text(ptx)
            options.output.joinpath(f"{name}.json").write_text(json.dumps({"name": name, **description}, indent=1))


def _prepare_environment(dump: str, ctas: int) -> None:
    """Set what the packages read from the environment. To be called before the first of them is imported."""
    os.environ.update(
        CUTE_DSL_ARCH="sm_100a",
        CUTE_DSL_KEEP="ptx,ir",
        CUTE_DSL_DUMP_DIR=dump,
        FLASH_ATTENTION_ARCH="sm_100",
        FLASH_ATTENTION_NUM_SMS=str(SMS),
        FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED="0",
        FA_DISABLE_2CTA="1" if ctas == 1 else "0",
    )


def _stub_hardware() -> None:
    """Answer what the packages ask the driver, which a machine without a GPU does not have."""
    import cutlass.utils
    import cutlass.utils.hardware_info
    import flash_attn.cute.interface  # noqa: F401 - binds the name in its modules
    import torch

    class Hardware:
        """The properties of the device that the kernels' host code asks for."""

        def __init__(self, device_id: int = 0) -> None:
            self.device_id = device_id

        def get_device_multiprocessor_count(self) -> int:
            return SMS

        def get_max_active_clusters(self, cluster_size: int, *_: object, **__: object) -> int:
            return SMS // cluster_size

    for module in (cutlass.utils, cutlass.utils.hardware_info, *tuple(sys.modules.values())):
        with contextlib.suppress(AttributeError):
            if module.HardwareInfo.__module__.startswith("cutlass"):
                module.HardwareInfo = Hardware
    torch.cuda.current_device = lambda: 0
    torch.zeros = torch.empty  # a fill would initialise CUDA


def _compile(direction: str, dtype: str, head_dim: str, mask: str) -> None:
    """Have the package compile one kernel. Lengths are dynamic; more than 256 queries select two tiles for a CTA."""
    import torch
    from flash_attn.cute import interface
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        shape = (1, 1024, 2, int(head_dim))
        q, k, v, out, d_out = (torch.empty(shape, dtype=getattr(torch, dtype), device="cuda") for _ in range(5))
        if direction == "fwd":
            interface._flash_attn_fwd(q, k, v, causal=mask == "causal", return_lse=True)
        else:
            lse = torch.empty((1, 2, 1024), dtype=torch.float32, device="cuda")
            interface._flash_attn_bwd(q, k, v, out, d_out, lse, causal=mask == "causal")


def _collect(dump: Path, direction: str, ctas: int) -> tuple[str, dict[str, Any]]:
    """Return the main kernel's PTX and its description from what the compiler dumped, and empty the dump."""
    files = [path for path in dump.rglob("*") if path.is_file()]
    mine = {path.suffix: path for path in files if f"flash_{direction}_sm100" in path.name}
    if not {".ptx", ".mlir"} <= set(mine):
        raise SystemExit(
            f"the compiler dumped no kernel of flash_{direction}_sm100 but {[path.name for path in files]}"
        )
    ptx = mine[".ptx"].read_text().replace("\0", "")
    host = mine[".mlir"].read_text()
    for path in files:
        path.unlink()

    entry = re.search(r"\.visible \.entry (\w+)", ptx)[1]
    launch = re.search(rf"cuda\.launch_ex @\w+::@{entry}<.*-> \(?!?cuda\.result", host)[0]
    types = _split(launch[launch.rindex(": !cuda.launch_cfg") :].partition(", (")[2].rpartition(") ->")[0])
    aliases = dict(re.findall(r"^(!\w+) = (.*)$", host, re.MULTILINE))
    cluster = re.search(r"cuda\.launch_cfg\.cluster_dim\[%\w+\] \(%c(\d+)_i32, %c(\d+)_i32, %c(\d+)_i32\)", host)
    description = {
        "entry": entry,
        "versions": {
            name: importlib.metadata.version(name) for name in ("flash-attn-4", "nvidia-cutlass-dsl", "torch")
        },
        "block": [int(size) for size in re.search(r"\.reqntid (\d+), (\d+), (\d+)", ptx).groups()],
        "cluster": [int(size) for size in cluster.groups()] if cluster else [1, 1, 1],
        "dynamic_shared": _shared_bytes(host),
        "parameters": _parameters(ptx, [aliases.get(text, text) for text in types]),
    }
    if description["cluster"] != [ctas, 1, 1]:
        raise SystemExit(f"asked for {ctas} CTAs, but the package chose the cluster {description['cluster']}")
    if direction == "fwd":
        _name_parameters(description)
    return ptx, description


def _split(text: str) -> list[str]:
    """Split a list of MLIR types at its commas, but not inside brackets or strings."""
    parts, start, depth, quoted = [], 0, 0, False
    for index, character in enumerate(text):
        if character == '"':
            quoted = not quoted
        elif not quoted and character in "<({[":
            depth += 1
        elif not quoted and character in ">)}]":
            depth -= 1
        elif character == "," and depth == 0 and not quoted:
            parts.append(text[start:index].strip())
            start = index + 1
    return [*parts, text[start:].strip()]


def _shared_bytes(host: str) -> int:
    """Return the extent of the dynamic shared memory that the kernel's one structure takes."""
    structures = re.findall(r"smem\.struct_fields = \[([^\]]*)\]", host)
    if len(structures) != 1:
        raise SystemExit(f"{len(structures)} structures in shared memory, not one")
    return max(int(size) + int(offset) for size, offset in re.findall(r'"\w+:(\d+):(\d+)"', structures[0]))


def _parameters(ptx: str, types: list[str]) -> list[dict[str, Any]]:
    """Describe each parameter of the entry by its place and by the type that the host code passes."""
    declared = ptx[ptx.index(".visible .entry") :].partition(")")[0]
    dynamic = [text for text in types if _kind(text) != "static"]
    found = re.findall(r"\.param (?:\.align (\d+) )?\.(\w+) (?:\.\w+ (?:\.align \d+ )?)*\w+(?:\[(\d+)\])?", declared)
    if len(found) != len(dynamic):
        raise SystemExit(f"the entry has {len(found)} parameters, the host passes {len(dynamic)}: {dynamic}")
    parameters, offset = [], 0
    for (align, element, count), text in zip(found, dynamic, strict=True):
        width = int(element[1:]) // 8
        step = int(align or width)
        offset = -(-offset // step) * step
        size = width * int(count or 1)
        parameter = {"offset": offset, "size": size, "kind": _kind(text), "type": text}
        if box := re.search(r'tma_gbasis = <"\(([\d,]+)\):', text):
            parameter["box"] = [int(size) for size in box[1].split(",")]
        parameters.append(parameter)
        offset += size
    return parameters


def _kind(text: str) -> str:
    """Return the kind of a parameter from the type that the host code passes; "static" ones take no parameter."""
    for pattern, kind in (
        (r"!cute\.coord_tensor<", "shape"),
        (r"!cute\.memref<", "tensor"),
        (r"!cute\.ptr<", "pointer"),
        (r"!cute_nvgpu\.atom\.non_exec_(tiled|im2col)_tma", "tensor_map"),
        (r"!cute\.tiled_mma<", "mma"),
        (r"!cute\.fast_divmod_divisor<32>", "divisor"),
        (r"!cute\.(composed_)?layout<[^?]*$", "static"),
        (r"!cute\.tiled_copy<!cute_nvgpu\.atom\.universal_copy<", "static"),
        (r"f32$", "float32"),
        (r"i32$", "int32"),
    ):
        if re.match(pattern, text):
            return kind
    return "unknown"


def _name_parameters(description: dict[str, Any]) -> None:
    """Add the scheduler and the parameters' names to the description of a forward kernel."""
    kinds = [parameter["kind"] for parameter in description["parameters"]]
    for scheduler, expected in FORWARD_PARAMETERS.items():
        if kinds == [kind for kind, _ in expected]:
            description["scheduler"] = scheduler
            for parameter, (_, name) in zip(description["parameters"], expected, strict=True):
                parameter["name"] = name
            return
    raise SystemExit(f"this version's parameters are not known: {kinds} ({description['versions']})")


if __name__ == "__main__":
    main(sys.argv[1:])
