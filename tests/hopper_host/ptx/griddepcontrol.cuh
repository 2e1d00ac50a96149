#pragma once

namespace cupyfa::ptx {
inline void griddepcontrol_launch_dependents() {}
inline void griddepcontrol_wait() {}
}  // namespace cupyfa::ptx
