# distutils: language = c++
# cython: language_level=3, boundscheck=False, wraparound=False
"""The machine, for Python: decoded programs in, a report out. core/machine.hpp is the whole story."""

from libc.stdint cimport int32_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy
from libcpp cimport bool
from libcpp.pair cimport pair
from libcpp.string cimport string
from libcpp.vector cimport vector

import numpy as np

cdef extern from "core/isa.hpp" namespace "cupyfa::emulator" nogil:
    cdef cppclass Instruction:
        pass

cdef extern from "core/report.hpp" namespace "cupyfa::emulator" nogil:
    cdef cppclass Finding:
        int32_t at, other, cta, warp
        uint32_t lanes
        string object, detail
        uint64_t times

    cdef cppclass Report:
        const vector[Finding] &findings()

cdef extern from "core/vector.hpp" namespace "cupyfa::emulator" nogil:
    cdef cppclass VectorUnit:
        const char *name

    const VectorUnit &vector_unit() except +

cdef extern from "core/machine.hpp" namespace "cupyfa::emulator" nogil:
    cdef cppclass CProgram "cupyfa::emulator::Program":
        vector[Instruction] code
        vector[int32_t] pool
        vector[uint8_t] roles, data
        vector[uint32_t] constants
        int32_t rows, predicates
        vector[pair[int32_t, int32_t]] specials
        uint32_t param_bytes, static_shared, dynamic_shared_offset, local_bytes
        void finish() except +

    cdef cppclass Dim3:
        uint32_t x, y, z

    cdef cppclass Buffer:
        uint64_t base, size
        uint8_t *data
        bool writable, protocol, initialised
        string name

    cdef cppclass Policy:
        double copies, products, spurious
        bool newest_first, random_elect, impatient
        int pieces, quantum

    cdef cppclass Options:
        Policy policy
        uint64_t seed, max_instructions, max_idle
        bool checks, strict_warpgroup, review, stop_at_error, record, lenient_tcgen05, programmatic
        uint32_t sms, resident, slots, launch_registers

    cdef cppclass Event:
        uint64_t time, value
        int32_t at, cta, warp, object
        uint8_t kind

    cdef cppclass Machine:
        Machine(
            const CProgram &, vector[Buffer], Options, Dim3, Dim3, Dim3, uint32_t, vector[uint8_t]) except +
        void run() except +
        Report report
        vector[Event] events
        uint64_t instructions, async_operations, checks, shuffles, votes

cdef extern from *:
    """
    #include "core/isa.hpp"
    #include "core/report.hpp"
    #include "core/machine.hpp"
    namespace cupyfa::emulator {
    #define CUPYFA_WORD(name, ...) " " #name "=" #__VA_ARGS__
    #define CUPYFA_LIST(list) #list CUPYFA_##list(CUPYFA_WORD)
    static const char* const lists[] = {
      CUPYFA_LIST(OPERATIONS), CUPYFA_LIST(TYPES), CUPYFA_LIST(SPACES), CUPYFA_LIST(ROUNDINGS), CUPYFA_LIST(FLAGS),
      CUPYFA_LIST(COMPARISONS), CUPYFA_LIST(BOOLEANS), CUPYFA_LIST(ORDERS), CUPYFA_LIST(SCOPES),
      CUPYFA_LIST(REDUCTIONS), CUPYFA_LIST(SPECIALS), CUPYFA_LIST(HAZARDS)};
    constexpr int list_count = sizeof(lists) / sizeof(lists[0]);
    #undef CUPYFA_LIST
    #undef CUPYFA_WORD
    static inline int hazard_of(const Finding& f) { return static_cast<int>(f.hazard); }
    static inline int severity_of(const Finding& f) { return static_cast<int>(f.severity); }
    static inline void set_order(Policy& p, int order) { p.order = static_cast<Policy::Order>(order); }
    }
    """
    int hazard_of "cupyfa::emulator::hazard_of"(const Finding &)
    int severity_of "cupyfa::emulator::severity_of"(const Finding &)
    void set_order "cupyfa::emulator::set_order"(Policy &, int)
    const char *lists "cupyfa::emulator::lists"[]
    int list_count "cupyfa::emulator::list_count"


cdef dict _read_lists():
    """The lists of core/isa.hpp and core/report.hpp: name of the list -> name -> number."""
    cdef dict found = {}
    for i in range(list_count):
        title, *words = (<bytes>lists[i]).decode().split(" ")
        pairs = [word.partition("=") for word in words if word.strip("=")]
        found[title] = {name: int(number) if number.strip() else k for k, (name, _, number) in enumerate(pairs)}
    return found


LISTS = _read_lists()
HAZARDS = tuple(LISTS["HAZARDS"])
VECTOR_UNIT = vector_unit().name.decode()

_ORDERS = {"round_robin": 0, "random": 1, "priorities": 2, "first": 3, "last": 4}
_SEVERITIES = ("information", "review", "error")


cdef class Code:
    """A program that the machine can run, any number of times.

    Parameters
    ----------
    program : Program
        As decoded. The arrays are copied.
    """

    cdef CProgram program

    def __init__(self, program):
        cdef const uint8_t[::1] code = np.ascontiguousarray(program.code).view(np.uint8).reshape(-1)
        cdef const int32_t[::1] pool = np.ascontiguousarray(program.pool, np.int32)
        cdef const uint8_t[::1] roles = np.ascontiguousarray(program.roles, np.uint8)
        cdef const uint32_t[::1] constants = np.ascontiguousarray(np.repeat(program.constants, 32), np.uint32)
        cdef bytes data = bytes(program.data)
        if code.shape[0] != program.code.size * sizeof(Instruction):
            raise ValueError(f"an instruction has {sizeof(Instruction)} bytes, not {program.code.itemsize}")
        self.program.code.resize(program.code.size)
        if code.shape[0]:
            memcpy(self.program.code.data(), &code[0], code.shape[0])
        self.program.pool.resize(pool.shape[0])
        self.program.roles.resize(pool.shape[0])
        if pool.shape[0]:
            memcpy(self.program.pool.data(), &pool[0], 4 * pool.shape[0])
            memcpy(self.program.roles.data(), &roles[0], pool.shape[0])
        self.program.constants.resize(constants.shape[0])
        if constants.shape[0]:
            memcpy(self.program.constants.data(), &constants[0], 4 * constants.shape[0])
        self.program.data.resize(len(data))
        if len(data):
            memcpy(self.program.data.data(), <const char *>data, len(data))
        self.program.rows, self.program.predicates = program.rows, program.predicates
        for row, special in program.specials:
            self.program.specials.push_back(pair[int32_t, int32_t](row, special))
        self.program.param_bytes, self.program.static_shared = program.param_bytes, program.static_shared
        self.program.dynamic_shared_offset = program.dynamic_shared_offset
        self.program.local_bytes = program.local_bytes
        self.program.finish()


def run(Code code not None, list buffers, bytes params, tuple grid, tuple block, tuple cluster, uint32_t shared_bytes,
        dict policy, dict options):
    """Run a kernel to its end or to the first thing that stops it.

    Parameters
    ----------
    code : Code
        The program.
    buffers : list of (address, ndarray of bytes, writable, protocol, initialised, name)
        Global memory.
    params : bytes
        The parameter block.
    grid, block, cluster : tuple of int
        CTAs, threads of a CTA, CTAs of a cluster.
    shared_bytes : int
        Dynamic shared memory of a CTA.
    policy, options : dict
        Fields of ``Policy`` and ``Options``.

    Returns
    -------
    tuple
        Findings (hazard, severity, at, other, cta, warp, lanes, object, detail, times), counts, events.
    """
    cdef vector[Buffer] memory
    cdef Buffer buffer
    cdef Options o
    cdef Dim3 g, b, c
    cdef vector[uint8_t] parameters
    cdef uint8_t[::1] view
    cdef const uint8_t[::1] constant
    cdef list kept = []
    cdef Machine *machine
    cdef const Finding *f
    cdef size_t i
    for address, array, writable, protocol, initialised, name in buffers:
        if not array.size:
            continue
        buffer.base, buffer.size = address, array.size
        if writable:
            view = array
            buffer.data = &view[0]
        else:
            constant = array
            buffer.data = <uint8_t *>&constant[0]
        kept.append(array)
        buffer.writable, buffer.protocol, buffer.initialised = writable, protocol, initialised
        buffer.name = name.encode()
        memory.push_back(buffer)
    o.policy.copies, o.policy.products = policy["copies"], policy["products"]
    o.policy.newest_first, o.policy.pieces = policy["newest_first"], policy["pieces"]
    o.policy.quantum, o.policy.spurious = policy["quantum"], policy["spurious"]
    o.policy.random_elect, o.policy.impatient = policy["random_elect"], policy["impatient"]
    set_order(o.policy, _ORDERS[policy["order"]])
    o.seed, o.max_instructions = options["seed"], options["max_instructions"]
    o.checks, o.strict_warpgroup = options["checks"], options["strict_warpgroup"]
    o.review, o.stop_at_error, o.record = options["review"], options["stop_at_error"], options["record"]
    o.lenient_tcgen05, o.programmatic = options["lenient_tcgen05"], options["programmatic"]
    o.max_idle = options["max_idle"]
    o.sms, o.resident, o.slots = options["sms"], options["resident"], options["slots"]
    o.launch_registers = options["launch_registers"]
    g.x, g.y, g.z = grid
    b.x, b.y, b.z = block
    c.x, c.y, c.z = cluster
    parameters.resize(len(params))
    if len(params):
        memcpy(parameters.data(), <const char *>params, len(params))
    machine = new Machine(code.program, memory, o, g, b, c, shared_bytes, parameters)
    try:
        with nogil:
            machine.run()
        findings = []
        for i in range(machine.report.findings().size()):
            f = &machine.report.findings()[i]
            findings.append((
                HAZARDS[hazard_of(f[0])], _SEVERITIES[severity_of(f[0])], f.at, f.other, f.cta, f.warp, f.lanes,
                f.object.decode(), f.detail.decode(), f.times))
        counts = {
            "instructions": machine.instructions, "async_operations": machine.async_operations,
            "checks": machine.checks, "shuffles": machine.shuffles, "votes": machine.votes}
        events = [
            (machine.events[i].time, machine.events[i].at, machine.events[i].cta, machine.events[i].warp,
             machine.events[i].kind, machine.events[i].object, machine.events[i].value)
            for i in range(machine.events.size())]
        return findings, counts, events
    finally:
        del machine
