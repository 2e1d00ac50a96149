"""The text of a PTX module, taken apart into entries and statements. No opcode is known here."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from cupyfa.emulator.scopes import Scope, Variable, declare_registers, parse_variable
from cupyfa.emulator.syntax import Operand, PtxError, UnsupportedInstruction, parse_operands

__all__ = ["Entry", "Location", "Module", "PtxError", "Statement", "UnsupportedInstruction", "parse"]


@dataclass(frozen=True, slots=True)
class Location:
    """A line of a source file, and the lines that it was inlined at, from the innermost call outwards."""

    file: str
    line: int
    callers: tuple[tuple[str, int], ...] = ()


@dataclass(slots=True)
class Statement:
    """One instruction."""

    line: int
    guard: str | None
    guard_negated: bool
    opcode: str
    operands: tuple[Operand, ...]
    text: str
    scope: Scope = field(repr=False)
    location: int


@dataclass(slots=True)
class Entry:
    """A kernel.

    Attributes
    ----------
    name : str
        As the driver knows it.
    line : int
        Where its body begins.
    parameters : tuple of Variable
        In order.
    directives : dict
        ``maxntid`` and the like with their numbers.
    scope : Scope
        The outermost of its body.
    statements : list of Statement
        In order; labels and scopes refer to them by index.
    body : str
        The text of the body.
    variables : list of Variable
        What the body declares, at any depth.
    """

    name: str
    line: int
    parameters: tuple[Variable, ...]
    directives: dict[str, tuple[int, ...]]
    scope: Scope
    statements: list[Statement] = field(default_factory=list)
    body: str = ""
    variables: list[Variable] = field(default_factory=list)


@dataclass(slots=True)
class Module:
    """A PTX file; `locations` is what the statements' `location` counts, where 0 means that there was no ``.loc``."""

    version: str = ""
    target: str = ""
    entries: dict[str, Entry] = field(default_factory=dict)
    scope: Scope = field(default_factory=Scope)
    locations: list[Location] = field(default_factory=lambda: [Location("<ptx>", 0)])


# Strings first, for a path may contain two slashes.
_COMMENT = re.compile(r'"[^"\n]*"|//[^\n]*|/\*.*?\*/', re.DOTALL)
_NAME = r"(?:[A-Za-z_]|[%$](?=[\w$]))[\w$]*"
_LOC = re.compile(
    r"\.loc\s+(\d+)\s+(\d+)\s+(\d+)(?:\s*,\s*function_name\s+[\w$%]+(?:\s*\+\s*\d+)?)?"
    r"(?:\s*,\s*inlined_at\s+(\d+)\s+(\d+)\s+(\d+))?\s*;?",
    re.ASCII,
)
_FILE = re.compile(r'\.file\s+(\d+)\s+"([^"\n]*)"(?:\s*,\s*\d+)*', re.ASCII)
_STATEMENT = re.compile(
    rf"""(?P<brace>[{{}}])
    | (?P<loc>\.loc\b)
    | (?P<label>{_NAME})\s*:(?!:)
    | \.(?P<directive>\w+)(?P<declared>[^;{{}}]*(?:\{{[^{{}};]*\}}[^;{{}}]*)*);
    | (?:@\s*(?P<negated>!?)\s*(?P<guard>{_NAME})\s+)?(?P<opcode>[A-Za-z_][\w.:]*)(?P<rest>[^;]*);""",
    re.VERBOSE | re.ASCII,
)
_SPACE = re.compile(r"[\s;]*")
_BRACE = re.compile(r'[{}]|"[^"\n]*"')
_TOP = re.compile(
    rf"""\.version\s+(?P<version>[\d.]+)
    | \.target\s+(?P<target>\w+)(?:\s*,\s*\w+)*
    | \.address_size\s+(?P<address>\d+)
    | (?P<file>\.file\b)
    | (?P<loc>\.loc\b)
    | \.section\s+[\w.$]+\s*(?P<section>\{{)
    | \.(?:pragma|alias)\b[^;]*;
    | (?P<linkage>(?:\.(?:extern|visible|weak|common)\s+)*)(?:
        \.entry\s+(?P<entry>{_NAME})\s*(?:\((?P<parameters>[^()]*)\))?(?P<directives>[^{{;]*)(?P<opens>[{{;])
        | (?P<function>\.func\b[^{{;]*)(?P<ends>[{{;])
        | (?P<variable>\.(?:global|const|shared)\b[^;]*);)""",
    re.VERBOSE | re.ASCII,
)
_DIRECTIVE = re.compile(r'\.(\w+)\s*("[^"\n]*"|(?:\d+\s*,?\s*)*)\s*;?\s*', re.ASCII)


def parse(text: str | bytes) -> Module:
    """Return the parts of a PTX module.

    Parameters
    ----------
    text : str or bytes
        The module. NUL bytes count as space: the driver's dumps end with one.

    Returns
    -------
    Module
        Its entries, with all statements taken apart.
    """
    if isinstance(text, bytes):
        text = text.decode("utf-8", errors="replace")
    return _Parser(_COMMENT.sub(_blank, text.replace("\0", " "))).module()


def _blank(comment: re.Match[str]) -> str:
    """Return what stays of a comment: its newlines, so that lines keep their numbers."""
    return comment[0] if comment[0][0] == '"' else " " + "\n" * comment[0].count("\n")


class _Parser:
    """A position in the text, and the module as far as it is read."""

    def __init__(self, text: str) -> None:
        self.text, self.position, self.line = text, 0, 1
        self.result = Module()
        self.files: dict[int, str] = {}
        # A .loc as its numbers; files are named at the end of the module.
        self.locs: dict[tuple[int, ...], int] = {}
        self.inlined: dict[tuple[int, ...], tuple[int, ...]] = {}
        self.chains: list[list[tuple[int, int]]] = []
        self.location = 0

    def advance(self, position: int) -> None:
        """Go on to a position, and count the lines."""
        self.line += self.text.count("\n", self.position, position)
        self.position = position

    def skip(self) -> bool:
        """Go on to the next word; return whether there is one."""
        if found := _SPACE.match(self.text, self.position):
            self.advance(found.end())
        return self.position < len(self.text)

    def here(self) -> str:
        """Return the beginning of what cannot be read."""
        return " ".join(self.text[self.position : self.position + 120].split())[:60]

    def module(self) -> Module:
        """Read all."""
        while self.skip():
            found = _TOP.match(self.text, self.position)
            if not found:
                raise PtxError("cannot read this part of the module", self.line, self.here())
            self.top(found)
        if not self.result.target:
            raise PtxError("no .target directive: this is not a PTX module", self.line)
        for chain in self.chains:
            named = [(self.files.get(file, f"<file {file}>"), line) for file, line in chain]
            self.result.locations.append(Location(*named[0], tuple(named[1:])))
        return self.result

    def top(self, found: re.Match[str]) -> None:
        """Read one part of the module."""
        if found["file"]:
            self.read_file()
        elif found["loc"]:
            self.read_loc()
        elif found["section"]:
            self.advance(found.start("section"))
            self.advance(self.closing_brace())
        elif found["entry"]:
            self.read_entry(found)
        elif found["function"]:
            self.advance(found.end() - 1)
            self.advance(self.closing_brace() if found["ends"] == "{" else found.end())
        elif found["variable"]:
            variable = parse_variable(found["linkage"] + found["variable"], self.line)
            self.declare(self.result.scope, variable)
            self.advance(found.end())
        else:
            self.result.version = found["version"] or self.result.version
            self.result.target = found["target"] or self.result.target
            if found["address"] not in (None, "64"):
                raise UnsupportedInstruction("addresses of 32 bits", self.line, found[0])
            self.advance(found.end())

    def closing_brace(self) -> int:
        """Return the position behind the brace that closes the one here."""
        depth = 0
        for found in _BRACE.finditer(self.text, self.position):
            depth += {"{": 1, "}": -1}.get(found[0], 0)
            if depth == 0:
                return found.end()
        raise PtxError("no brace closes this one", self.line, self.here())

    def declare(self, scope: Scope, variable: Variable) -> None:
        """Enter a variable into a scope."""
        known = scope.variables.get(variable.name)
        if known is not None and not known.external and not variable.external:
            raise PtxError(f"{variable.name} is declared twice", self.line)
        if known is None or known.external:
            scope.variables[variable.name] = variable

    def read_file(self) -> None:
        """Read a ``.file`` directive."""
        found = _FILE.match(self.text, self.position)
        if not found:
            raise PtxError("cannot read the .file directive", self.line, self.here())
        self.files[int(found[1])] = found[2]
        self.advance(found.end())

    def read_loc(self) -> None:
        """Read a ``.loc`` directive. One call level is written at a time: the rest of the chain was read before."""
        found = _LOC.match(self.text, self.position)
        if not found:
            raise PtxError("cannot read the .loc directive", self.line, self.here())
        numbers = tuple([int(number) for number in found.groups() if number is not None])
        place, caller = numbers[:3], numbers[3:]
        self.inlined[place] = caller
        key, chain = place + caller, [place]
        while caller and len(chain) < 64:
            chain.append(caller)
            caller = self.inlined.get(caller, ())
            key += caller
        if key not in self.locs:
            self.chains.append([(file, line) for file, line, _ in chain])
            self.locs[key] = len(self.chains)
        self.location = self.locs[key]
        self.advance(found.end())

    def read_entry(self, found: re.Match[str]) -> None:
        """Read a kernel."""
        name = found["entry"]
        items = [item for item in (found["parameters"] or "").split(",") if item.strip()]
        parameters = tuple([parse_variable(item, self.line) for item in items])
        directives = {}
        position, text = 0, found["directives"].strip()
        while position < len(text):
            directive = _DIRECTIVE.match(text, position)
            if not directive:
                raise PtxError(f"cannot read the directives {text!r} of the kernel {name}", self.line)
            directives[directive[1]] = tuple(int(number) for number in re.findall(r"\d+", directive[2]))
            position = directive.end()
        self.advance(found.end())
        if found["opens"] == ";":
            return
        if name in self.result.entries:
            raise PtxError(f"the kernel {name} is defined twice", self.line)
        outer = Scope(self.result.scope)
        scope = Scope(outer)
        for parameter in parameters:
            if parameter.space != "param":
                raise PtxError(f"the parameter {parameter.name} is not of .param", self.line)
            self.declare(outer, parameter)
        entry = Entry(name, self.line, parameters, directives, scope)
        self.location = 0
        begin = self.position
        self.read_body(entry)
        entry.body = self.text[begin : self.position]
        self.result.entries[name] = entry

    def read_body(self, entry: Entry) -> None:
        """Read up to the brace that closes a kernel."""
        scope = entry.scope
        around: list[Scope] = []
        label = None
        match, statements = _STATEMENT.match, entry.statements
        while self.skip():
            found = match(self.text, self.position)
            if not found:
                raise PtxError("cannot read this statement (a missing semicolon?)", self.line, self.here())
            kind = found.lastgroup
            if kind == "rest":
                statements.append(self.statement(found, scope))
            elif kind == "label":
                label = found["label"]
                if label in scope.labels:
                    raise PtxError(f"the label {label} is defined twice", self.line)
                scope.labels[label] = len(statements)
            elif kind == "loc":
                self.read_loc()
                continue
            elif kind == "declared":
                self.directive(found, entry, scope, label)
            elif found["brace"] == "{":
                around.append(scope)
                scope = Scope(scope)
            elif around:
                scope = around.pop()
            else:
                self.advance(found.end())
                return
            self.advance(found.end())
        raise PtxError(f"the text ends inside the kernel {entry.name}", self.line)

    def statement(self, found: re.Match[str], scope: Scope) -> Statement:
        """Return an instruction."""
        text = " ".join(found[0][:-1].split())
        try:
            operands = parse_operands(found["rest"])
        except PtxError as error:
            raise error.at(self.line, text[:200]) from None
        return Statement(
            self.line, found["guard"], bool(found["negated"]), found["opcode"], operands, text, scope, self.location
        )

    def directive(self, found: re.Match[str], entry: Entry, scope: Scope, label: str | None) -> None:
        """Read a directive inside a kernel; `label` is the last one before it."""
        word, text = found["directive"], " ".join(found[0][:-1].split())
        try:
            if word == "reg":
                declare_registers(scope, " ".join(found["declared"].split()))
            elif word in ("shared", "local", "param"):
                variable = parse_variable(text, self.line)
                self.declare(scope, variable)
                entry.variables.append(variable)
            elif word == "branchtargets":
                if label is None:
                    raise PtxError("a list of branch targets without a label")
                scope.tables[label] = tuple(item.strip() for item in found["declared"].split(","))
            elif word not in ("pragma", "callprototype", "calltargets"):
                raise UnsupportedInstruction(f"the directive .{word} inside a kernel")
        except PtxError as error:
            raise error.at(self.line, text[:200]) from None
