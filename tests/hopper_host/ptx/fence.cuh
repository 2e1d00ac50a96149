#pragma once

namespace cupyfa::ptx {
inline void fence_proxy_async_shared_cta() { request("proxy_fence"); }
}  // namespace cupyfa::ptx
