"""Writes the text of a kernel: registers by number, parameters, and the pieces that every micro-kernel needs."""

from __future__ import annotations

from typing import Final

CLASSES: Final = {"h": ".b16", "r": ".b32", "f": ".f32", "d": ".b64", "p": ".pred"}


class Kernel:
    """A kernel under construction. Calling it adds a line.

    ``parameters``: "name:kind ..."; a ptr and a map become a 64-bit register of that name, a u32 a 32-bit one.
    """

    def __init__(self, name: str, parameters: str, directives: str = "", static: str = "") -> None:
        self.name, self.directives = name, directives
        self.lines: list[str] = [static] if static else []
        self.counts = dict.fromkeys(CLASSES, 0)
        self.labels = 0
        self.parameters = [item.split(":") for item in parameters.split()]
        for label, kind in self.parameters:
            symbol = f"{name}_{label}"
            if kind == "u32":
                self(f".reg .b32 %{label};")
                self(f"ld.param.u32 %{label}, [{symbol}];")
            elif kind == "ptr":
                self(f".reg .b64 %{label};")
                self(f"ld.param.u64 %{label}, [{symbol}];")
            else:
                self(f".reg .b64 %{label};")
                self(f"mov.b64 %{label}, {symbol};")
                self(f"cvta.param.u64 %{label}, %{label};")

    def __call__(self, *lines: str) -> None:
        self.lines += lines

    def new(self, kind: str) -> str:
        """A register not used before."""
        self.counts[kind] += 1
        return f"%{kind}{self.counts[kind] - 1}"

    def set(self, kind: str, instruction: str) -> str:
        """A new register and the instruction that gives it its value; $ stands for it."""
        register = self.new(kind)
        self(instruction.replace("$", register) + ";")
        return register

    def label(self) -> str:
        self.labels += 1
        return f"L{self.labels}"

    def text(self) -> str:
        kinds = {"u32": ".param .u32 {}", "ptr": ".param .u64 {}", "map": ".param .align 64 .b8 {}[128]"}
        parameters = ", ".join(kinds[kind].format(f"{self.name}_{label}") for label, kind in self.parameters)
        pools = [f".reg {CLASSES[kind]} %{kind}<{count}>;" for kind, count in self.counts.items() if count]
        body = "\n".join(pools + self.lines)
        return f".visible .entry {self.name}({parameters}) {self.directives}\n{{\n{body}\nret;\n}}\n"

    # --- pieces ---

    def tid(self) -> str:
        return self.set("r", "mov.u32 $, %tid.x")

    def cta(self) -> str:
        return self.set("r", "mov.u32 $, %ctaid.x")

    def offset(self, pointer: str, index: str, size: int) -> str:
        """pointer + index * size, in a new register."""
        return self.set("d", f"mad.wide.u32 $, {index}, {size}, {pointer}")

    def smem(self) -> str:
        """The shared address of the dynamic array."""
        return self.set("r", "mov.u32 $, smem")

    def copy(self, to: str, source: str, size: int | str, *, shared_source: bool) -> None:
        """All threads copy ``size`` bytes, a multiple of 16, between a shared (32-bit) and a global address."""
        offset, step = self.new("r"), self.new("r")
        values = [self.new("r") for _ in range(4)]
        done, more, again, end = self.new("p"), self.new("p"), self.label(), self.label()
        address32, address64 = self.new("r"), self.new("d")
        shared, remote = (source, to) if shared_source else (to, source)
        vector = "{" + ", ".join(values) + "}"
        self(
            f"mov.u32 {offset}, %tid.x;",
            f"shl.b32 {offset}, {offset}, 4;",
            f"mov.u32 {step}, %ntid.x;",
            f"shl.b32 {step}, {step}, 4;",
            f"setp.ge.u32 {done}, {offset}, {size};",
            f"@{done} bra {end};",
            f"{again}:",
            f"add.u32 {address32}, {shared}, {offset};",
            f"cvt.u64.u32 {address64}, {offset};",
            f"add.u64 {address64}, {address64}, {remote};",
        )
        if shared_source:
            self(f"ld.shared.v4.b32 {vector}, [{address32}];", f"st.global.v4.b32 [{address64}], {vector};")
        else:
            self(f"ld.global.v4.b32 {vector}, [{address64}];", f"st.shared.v4.b32 [{address32}], {vector};")
        self(
            f"add.u32 {offset}, {offset}, {step};",
            f"setp.lt.u32 {more}, {offset}, {size};",
            f"@{more} bra {again};",
            f"{end}:",
        )

    def fill(self, shared: str, size: int | str, value: int) -> None:
        """All threads write a 32-bit value over ``size`` bytes of shared memory."""
        offset, step, address = self.new("r"), self.new("r"), self.new("r")
        constant = self.set("r", f"mov.u32 $, {value}")
        done, more, again, end = self.new("p"), self.new("p"), self.label(), self.label()
        self(
            f"mov.u32 {offset}, %tid.x;",
            f"shl.b32 {offset}, {offset}, 2;",
            f"mov.u32 {step}, %ntid.x;",
            f"shl.b32 {step}, {step}, 2;",
            f"setp.ge.u32 {done}, {offset}, {size};",
            f"@{done} bra {end};",
            f"{again}:",
            f"add.u32 {address}, {shared}, {offset};",
            f"st.shared.b32 [{address}], {constant};",
            f"add.u32 {offset}, {offset}, {step};",
            f"setp.lt.u32 {more}, {offset}, {size};",
            f"@{more} bra {again};",
            f"{end}:",
        )

    def first_thread(self) -> str:
        """A predicate: this is thread 0 of the CTA."""
        return self.set("p", f"setp.eq.u32 $, {self.tid()}, 0")

    def wait(self, barrier: str, parity: int | str = 0) -> str:
        """Wait for a phase, but not for ever: a register that is 1 if it came. A hang on the GPU costs a run."""
        count, arrived, again = self.new("r"), self.new("p"), self.label()
        left = self.new("p")
        self(
            f"mov.u32 {count}, 0;",
            f"{again}:",
            f"mbarrier.test_wait.parity.shared::cta.b64 {arrived}, [{barrier}], {parity};",
            f"add.u32 {count}, {count}, 1;",
            f"setp.lt.u32 {left}, {count}, 1000000;",
            f"@{arrived} mov.u32 {count}, 0x7fffffff;",
            f"setp.lt.u32 {left}, {count}, 1000000;",
            f"@{left} bra {again};",
        )
        return self.set("r", f"selp.b32 $, 1, 0, {arrived}")
