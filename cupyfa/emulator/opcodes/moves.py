"""mov, selp: moves, packing and unpacking."""

from __future__ import annotations

from cupyfa.emulator.builder import DEFINED, Builder
from cupyfa.emulator.isa import BITS
from cupyfa.emulator.opcodes.forms import Define, DefPredicate, Expand, Form, Operands, Use, UsePredicate, family
from cupyfa.emulator.opcodes.spelling import Spelling
from cupyfa.emulator.syntax import Name, Operand, PtxError, Vector

# A vector of n parts of this size makes up the type.
_PARTS = {("b16", 2): "b8", ("b32", 4): "b8", ("b32", 2): "b16", ("b64", 4): "b16", ("b64", 2): "b32"}
_PARTS |= {("b128", 4): "b32", ("b128", 2): "b64"}


def untyped(kind: str) -> str:
    """Return the b type of the same size, at least 32 bits: rows are never narrower."""
    return f"b{max(32, BITS[kind])}"


@family("mov")
def mov(spelling: Spelling) -> Form:
    """``mov``."""
    kind = spelling.type("pred b16 u16 s16 f16 bf16 b32 u32 s32 f32 f16x2 bf16x2 b64 u64 s64 f64 b128")
    if kind == "pred":
        return Form("mov", (DefPredicate(), UsePredicate()), "pred")
    exact = f"b{BITS[kind]}"
    scalar = Form("mov", (Define(kind), Use(kind)), untyped(kind))
    return Form("mov", expand=_expand(scalar, exact) if kind == exact else None, roles=scalar.roles, type=scalar.type)


def _expand(scalar: Form, kind: str) -> Expand:
    """Return what writes a move of a b type: its operands decide what it is."""

    def expand(builder: Builder, operands: Operands) -> None:
        if len(operands) == 2 and isinstance(operands[0], Vector):
            _unpack(builder, kind, operands[0].items, operands[1])
        elif len(operands) == 2 and isinstance(operands[1], Vector):
            _pack(builder, kind, operands[0], operands[1].items)
        else:
            scalar.write(builder, operands)

    return expand


def _part_type(kind: str, items: Operands) -> str:
    """Return the type of a vector's parts."""
    part = _PARTS.get((kind, len(items)))
    if part is None:
        raise PtxError(f"a vector of {len(items)} in a move of .{kind}")
    return part


def _pack(builder: Builder, kind: str, target: Operand, items: Operands) -> None:
    """Write ``mov d, {a, b, ...}``: each row of the target is a part, or two or four of them."""
    part = _part_type(kind, items)
    sources = [row for item in items for row in builder.values(item, part)]
    rows = list(builder.register(target, kind))
    if part in ("b32", "b64"):
        for row in rows:
            builder.put(row, DEFINED)
        for row in sources:
            builder.read(row)
        builder.emit("mov", kind)
        return
    per_row = len(sources) // len(rows)
    for index, row in enumerate(rows):
        parts = sources[index * per_row : (index + 1) * per_row]
        if per_row == 4:
            halves = builder.temporary(2)
            builder.before("pack8", "none", halves[:1], parts[:2])
            builder.before("pack8", "none", halves[1:], parts[2:])
            parts = halves
        builder.put(row, DEFINED)
        builder.read(parts[0])
        builder.read(parts[1])
        builder.emit("pack8" if kind == "b16" else "pack16")


def _is_sink(item: Operand) -> bool:
    return isinstance(item, Name) and item.name == "_"


def _unpack(builder: Builder, kind: str, items: Operands, source: Operand) -> None:
    """Write ``mov {a, b, ...}, s``; a part ``_`` is not wanted."""
    part = _part_type(kind, items)
    rows = builder.values(source, kind)
    targets = [None if _is_sink(item) else list(builder.register(item, part)) for item in items]
    wanted = [row for target in targets if target for row in target]
    if len(set(wanted)) != len(wanted):
        raise PtxError("a register is written twice")
    if not wanted:
        raise PtxError("nothing of the vector is wanted")
    if part in ("b32", "b64"):
        _unpack_rows(builder, kind, targets, rows, len(rows) // len(items))
    elif part == "b16":
        for index, row in enumerate(rows):
            pair = targets[2 * index : 2 * index + 2]
            for target in pair:
                if target:
                    builder.put(target[0], DEFINED)
                else:
                    builder.absent()
            builder.read(row)
            if any(pair):
                builder.emit("unpack16")
            else:
                builder.current.entries.clear()
                builder.current.roles.clear()
    else:
        for index, target in enumerate(targets):
            if target:
                builder.put(target[0], DEFINED)
                for row in (rows[0], builder.constant(8 * index), builder.constant(8)):
                    builder.read(row)
                builder.emit("bfe", "u32")


def _unpack_rows(builder: Builder, kind: str, targets: list[list[int] | None], rows: list[int], per_part: int) -> None:
    """Write an unpacking that only copies rows: one record, or one for each part if some are not wanted."""
    chosen = [(index, target) for index, target in enumerate(targets) if target]
    if len(chosen) < len(targets):
        for index, target in chosen:
            for row in target:
                builder.put(row, DEFINED)
            for row in rows[index * per_part : (index + 1) * per_part]:
                builder.read(row)
            builder.emit("mov", f"b{32 * per_part}")
        return
    for _, target in chosen:
        for row in target:
            builder.put(row, DEFINED)
    for row in rows:
        builder.read(row)
    builder.emit("mov", kind)


@family("selp")
def selp(spelling: Spelling) -> Form:
    """``selp``."""
    kind = spelling.type("b16 u16 s16 f16 bf16 b32 u32 s32 f32 b64 u64 s64 f64")
    return Form("selp", (Define(kind), Use(kind), Use(kind), UsePredicate()), untyped(kind))
