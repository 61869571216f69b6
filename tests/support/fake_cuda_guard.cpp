// A CPU build of torch has no device guard for CUDA, and slicing a fake tensor asks for one. This registers one that does nothing.
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {
C10_REGISTER_GUARD_IMPL(CUDA, c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>);
}
