// Programmatic dependent launch (PTX ISA, "griddepcontrol"): a kernel that starts under the end of the one before it.
#pragma once

namespace cupyfa::ptx {

/// Lets the next kernel in the stream start, if it was launched so. It may not use what this one writes before it waits.
__device__ inline void griddepcontrol_launch_dependents() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

/// Waits for the kernel before this one, and for all that it has written.
__device__ inline void griddepcontrol_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

}  // namespace cupyfa::ptx
