"""Branches, exits, and the instructions that are none of the others."""

from __future__ import annotations

from cupyfa.emulator.builder import Builder
from cupyfa.emulator.opcodes.forms import Expand, Form, Operands, Use, family
from cupyfa.emulator.opcodes.spelling import Spelling
from cupyfa.emulator.syntax import Name, Operand, PtxError


def _target(builder: Builder, operand: Operand) -> int:
    """Return the statement that a label stands before."""
    if not isinstance(operand, Name) or operand.offset or operand.negated:
        raise PtxError("expected a label")
    statement = builder.scope.find_label(operand.name)
    if statement is None:
        raise PtxError(f"the label {operand.name} is not defined")
    return statement


@family("bra")
def bra(spelling: Spelling) -> Form:
    """``bra``."""
    return Form("bra", expand=_branch(int(spelling.flag("uni"))))


def _branch(uniform: int) -> Expand:
    def expand(builder: Builder, operands: Operands) -> None:
        if len(operands) != 1:
            raise PtxError(f"expected a label, got {len(operands)} operands")
        builder.emit("bra", attr=(uniform,), targets=(_target(builder, operands[0]),))

    return expand


@family("brx")
def brx(spelling: Spelling) -> Form:
    """``brx.idx``."""
    spelling.require("idx")
    spelling.flag("uni")

    def expand(builder: Builder, operands: Operands) -> None:
        if len(operands) != 2 or not isinstance(operands[1], Name):
            raise PtxError("expected an index and a list of targets")
        table = builder.scope.find_table(operands[1].name)
        if table is None:
            raise PtxError(f"{operands[1].name} is no list of branch targets")
        builder.use(operands[0], "u32")
        builder.put(len(table))
        targets = tuple(_target(builder, Name(label)) for label in table)
        for _ in targets:
            builder.put(0)
        builder.emit("brx", targets=targets)

    return Form("brx", expand=expand)


@family("ret", "exit")
def leave(spelling: Spelling) -> Form:
    """``ret``, ``exit``: an entry returns nowhere."""
    spelling.flag("uni")
    return Form("exit")


@family("trap", "brkpt")
def trap(spelling: Spelling) -> Form:
    """``trap``, ``brkpt``."""
    return Form(spelling.base)


@family("nanosleep")
def nanosleep(spelling: Spelling) -> Form:
    """``nanosleep``."""
    spelling.type("u32")
    return Form("nanosleep", (Use("u32"),))


@family("griddepcontrol")
def griddepcontrol(spelling: Spelling) -> Form:
    """``griddepcontrol``."""
    word = spelling.one_of(("wait", "launch_dependents"))
    return Form("griddep", attr=(int(word == "launch_dependents"),))
