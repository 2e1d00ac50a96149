"""Where variables lie: the parameter block, shared and local memory, and the image of the module's data."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from cupyfa.emulator.isa import BITS, MODULE_DATA, SHARED_FIRST
from cupyfa.emulator.program import Parameter
from cupyfa.emulator.ptx import Entry, Module
from cupyfa.emulator.scopes import Variable
from cupyfa.emulator.syntax import Integer, Name, PtxError, Real, UnsupportedInstruction, parse_operand

__all__ = ["Layout", "lay_out"]

_LARGEST_IMAGE = 1 << 28
# What no device has: a mistake, and too much to allocate for each thread or CTA.
_SHARED_LIMIT = 1 << 20
_LOCAL_LIMIT = 1 << 19
_PARAMETER_LIMIT = 32764
_INITIAL = re.compile(r"\s*([{},]|generic\s*\(\s*[\w$%]+\s*\)(?:\s*[+-]\s*\w+)?|[^{},]+)")


@dataclass
class Layout:
    """Offsets of variables; `places` has the address for .global and .const."""

    places: dict[Variable, int] = field(default_factory=dict)
    params: tuple[Parameter, ...] = ()
    param_bytes: int = 0
    static_shared: int = 0
    dynamic_shared: int = 0
    shared_symbols: dict[str, tuple[int, int]] = field(default_factory=dict)
    data: bytes = b""
    data_symbols: dict[str, tuple[int, int]] = field(default_factory=dict)
    local_bytes: int = 0


def _align(offset: int, align: int) -> int:
    return -(-offset // align) * align


def lay_out(module: Module, entry: Entry) -> Layout:
    """Return where the variables that an entry sees lie.

    Parameters
    ----------
    module : Module
        Its module: all .global and .const variables are laid out, of the .shared ones those that the entry names.
    entry : Entry
        The kernel.
    """
    layout = Layout()
    _parameters(layout, entry)
    _shared(layout, module, entry)
    for variable in entry.variables:
        if variable.space == "local":
            layout.local_bytes = _align(layout.local_bytes, variable.align)
            layout.places[variable] = layout.local_bytes
            layout.local_bytes += variable.size
            if layout.local_bytes > _LOCAL_LIMIT:
                raise PtxError(f"{layout.local_bytes} bytes of .local variables", variable.line)
    _data(layout, module)
    return layout


def _parameters(layout: Layout, entry: Entry) -> None:
    params, end = [], 0
    for variable in entry.parameters:
        offset = _align(end, variable.align)
        layout.places[variable] = offset
        params.append(Parameter(variable.name, offset, variable.size, variable.align))
        end = offset + variable.size
        if end > _PARAMETER_LIMIT:
            raise PtxError(f"{end} bytes of parameters", variable.line)
    layout.params, layout.param_bytes = tuple(params), end


def _shared(layout: Layout, module: Module, entry: Entry) -> None:
    names = [name for name, variable in module.scope.variables.items() if variable.space == "shared"]
    named: set[str] = set()
    if names:
        words = "|".join(re.escape(name) for name in names)
        named.update(re.findall(rf"(?<![\w$%])(?:{words})(?![\w$])", entry.body, re.ASCII))
    variables = [module.scope.variables[name] for name in names if name in named]
    variables += [variable for variable in entry.variables if variable.space == "shared"]
    end, dynamic_align = 0, 16
    for variable in variables:
        if variable.external or not variable.size:
            dynamic_align = max(dynamic_align, variable.align)
            continue
        offset = _align(SHARED_FIRST + end, variable.align) - SHARED_FIRST
        layout.places[variable] = offset
        layout.shared_symbols[variable.name] = (offset, variable.size)
        end = offset + variable.size
        if end > _SHARED_LIMIT:
            raise PtxError(f"{end} bytes of .shared variables", variable.line)
    layout.static_shared = end
    layout.dynamic_shared = _align(SHARED_FIRST + end, dynamic_align) - SHARED_FIRST
    for variable in variables:
        if variable not in layout.places:
            layout.places[variable] = layout.dynamic_shared
            layout.shared_symbols[variable.name] = (layout.dynamic_shared, 0)


def _data(layout: Layout, module: Module) -> None:
    end = 0
    variables = [
        variable
        for variable in module.scope.variables.values()
        if variable.space in ("global", "const") and not variable.external
    ]
    for variable in variables:
        offset = _align(end, variable.align)
        layout.places[variable] = MODULE_DATA + offset
        layout.data_symbols[variable.name] = (offset, variable.size)
        end = offset + variable.size
        if end > _LARGEST_IMAGE:
            raise UnsupportedInstruction(f"{end} bytes of .global and .const variables", variable.line)
    image = bytearray(end)
    for variable in variables:
        if variable.initial is not None:
            offset = layout.data_symbols[variable.name][0]
            try:
                _initialise(memoryview(image)[offset : offset + variable.size], variable, layout, module)
            except PtxError as error:
                raise error.at(variable.line, variable.name) from None
    layout.data = bytes(image)


def _initialise(image: memoryview, variable: Variable, layout: Layout, module: Module) -> None:
    """Write the initial values of a variable: nested braces only group."""
    unit = BITS[variable.type] // 8
    offset = 0
    for text in _values(variable.initial or ""):
        if offset + unit > len(image):
            raise PtxError("more initial values than elements")
        value = _value(text, variable.type, layout, module) & ((1 << 8 * unit) - 1)
        image[offset : offset + unit] = value.to_bytes(unit, "little")
        offset += unit


def _values(text: str) -> Iterator[str]:
    position = 0
    text = text.rstrip()
    while position < len(text):
        found = _INITIAL.match(text, position)
        if not found:
            raise PtxError(f"cannot read the initial value {text[position:][:60]!r}")
        position = found.end()
        if found[1] not in "{},":
            yield found[1].strip()


def _value(text: str, kind: str, layout: Layout, module: Module) -> int:
    generic = re.fullmatch(r"generic\s*\(\s*([\w$%]+)\s*\)\s*(.*)", text, re.DOTALL)
    operand = parse_operand((generic[1] + generic[2]) if generic else text)
    if isinstance(operand, Integer) and kind not in ("f32", "f64"):
        return operand.value
    if isinstance(operand, Real) and kind in ("f32", "f64", "b32", "b64"):
        return operand.double_bits() if kind in ("f64", "b64") else operand.single_bits()
    if isinstance(operand, Name):
        variable = module.scope.variables.get(operand.name)
        if variable is None or variable not in layout.places or variable.space not in ("global", "const"):
            raise PtxError(f"{operand.name} is no .global or .const variable of this module")
        if BITS[kind] != 64:
            raise UnsupportedInstruction(f"an address in a variable of type .{kind}")
        return layout.places[variable] + operand.offset
    raise PtxError(f"the initial value {text!r} for the type .{kind}")
