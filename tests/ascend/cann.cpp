// A stand-in for CANN's runtime: host memory plays the memory of the devices, every stream is done
// at once, and whatever a test may ask about is written to a record.
//
// Read on every call, from the environment:
//   CANN_STANDIN_DEVICES   how many devices there are (none)
//   CANN_STANDIN_VERSION   the version that every part of CANN reports (9.2.0)
//   CANN_STANDIN_RECORD    the file to which calls are appended: device, name, arguments
#include "record.h"

#include <acl/acl.h>
#include <acl/acl_op_compiler.h>
#include <hccl/hccl.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>

namespace {

std::string setting(const char *name, const char *otherwise) {
    const char *value = std::getenv(name);
    return value ? value : otherwise;
}

int devices() { return std::atoi(setting("CANN_STANDIN_DEVICES", "0").c_str()); }

std::string version() { return setting("CANN_STANDIN_VERSION", "9.2.0"); }

constexpr int ABSENT = -1;
thread_local int device_in_use = ABSENT;
char contexts[64];  // only their addresses matter
std::map<int, int64_t> process_options, context_options;
std::map<int, std::string> compile_options;

aclError allocate(void **address, size_t bytes) {
    constexpr size_t alignment = 512;
    return posix_memalign(address, alignment, bytes ? bytes : alignment) ? ACL_ERROR_BAD_ALLOC : 0;
}

template <typename Value, typename Handle> aclError make(Handle *handle) {
    *handle = reinterpret_cast<Handle>(new Value());
    return ACL_SUCCESS;
}

template <typename Value, typename Number> aclError answer(Number *place, Value value) {
    *place = static_cast<Number>(value);
    return ACL_SUCCESS;
}

}  // namespace

void append_to_record(const std::string &call) {
    const std::string file = setting("CANN_STANDIN_RECORD", "");
    if (file.empty()) return;
    const std::string device = device_in_use == ABSENT ? "-" : std::to_string(device_in_use);
    const std::string line = device + ' ' + call + '\n';
    FILE *record = std::fopen(file.c_str(), "a");
    std::fwrite(line.data(), 1, line.size(), record);
    std::fclose(record);
}

extern "C" {

// Devices and what is known about them.
aclError aclInit(const char *) {
    record("aclInit");
    return devices() > 0 ? ACL_SUCCESS : ACL_ERROR_RT_DEV_SETUP_ERROR;
}
aclError aclFinalize() { return ACL_SUCCESS; }
aclError aclrtGetDeviceCount(uint32_t *count) { return answer(count, devices()); }
aclError aclrtSetDevice(int32_t device) {
    if (device < 0 || device >= devices()) return ACL_ERROR_RT_INVALID_DEVICEID;
    if (device != device_in_use) record("aclrtSetDevice", device);
    device_in_use = device;
    return ACL_SUCCESS;
}
aclError aclrtGetDevice(int32_t *device) {
    return device_in_use == ABSENT ? ACL_ERROR_RT_CONTEXT_NULL : answer(device, device_in_use);
}
aclError aclrtResetDevice(int32_t) {
    device_in_use = ABSENT;
    return ACL_SUCCESS;
}
aclError aclrtGetCurrentContext(aclrtContext *context) {
    return device_in_use == ABSENT ? ACL_ERROR_RT_CONTEXT_NULL
                                   : answer(reinterpret_cast<uintptr_t *>(context),
                                            reinterpret_cast<uintptr_t>(&contexts[device_in_use]));
}
aclError aclrtSetCurrentContext(aclrtContext context) {
    device_in_use = static_cast<int>(static_cast<char *>(context) - contexts);
    return ACL_SUCCESS;
}
aclError aclrtGetPrimaryCtxState(int32_t device, uint32_t *flags, int32_t *active) {
    if (flags) *flags = 0;
    return answer(active, device == device_in_use);
}
const char *aclrtGetSocName() { return "Ascend910B1"; }
const char *aclGetRecentErrMsg() { return "the stand-in for CANN cannot do this"; }
aclError aclsysGetVersionStr(char *, char *text) {
    std::strcpy(text, version().c_str());
    return ACL_SUCCESS;
}
aclError aclsysGetCANNVersion(aclCANNPackageName, aclCANNPackageVersion *text) {
    std::memset(text, 0, sizeof *text);
    std::strcpy(text->version, version().c_str());
    return ACL_SUCCESS;
}
aclError aclGetDeviceCapability(uint32_t, aclDeviceInfo, int64_t *value) {
    return answer(value, 20);
}
aclError aclrtGetDeviceInfo(uint32_t, aclrtDevAttr, int64_t *value) { return answer(value, 20); }
aclError aclGetCannAttribute(aclCannAttr, int32_t *value) { return answer(value, 1); }
aclError aclrtDeviceCanAccessPeer(int32_t *can, int32_t, int32_t) { return answer(can, 0); }
aclError aclrtDeviceGetBareTgid(int32_t *process) { return answer(process, 1); }

// Memory.
aclError aclrtMalloc(void **place, size_t bytes, aclrtMemMallocPolicy) {
    return allocate(place, bytes);
}
aclError aclrtMallocAlign32(void **place, size_t bytes, aclrtMemMallocPolicy) {
    return allocate(place, bytes);
}
aclError aclrtMallocHost(void **place, size_t bytes) { return allocate(place, bytes); }
aclError aclrtMallocHostWithCfg(void **place, uint64_t bytes, aclrtMallocConfig *) {
    return allocate(place, bytes);
}
aclError aclrtFree(void *place) {
    std::free(place);
    return ACL_SUCCESS;
}
aclError aclrtFreeHost(void *place) { return aclrtFree(place); }
aclError aclrtMemcpy(void *to, size_t, const void *from, size_t bytes, aclrtMemcpyKind) {
    std::memmove(to, from, bytes);
    return ACL_SUCCESS;
}
aclError aclrtMemcpyAsync(void *to, size_t room, const void *from, size_t bytes,
                          aclrtMemcpyKind kind, aclrtStream) {
    return aclrtMemcpy(to, room, from, bytes, kind);
}
aclError aclrtMemset(void *place, size_t, int32_t value, size_t bytes) {
    std::memset(place, value, bytes);
    return ACL_SUCCESS;
}
aclError aclrtMemsetAsync(void *place, size_t room, int32_t value, size_t bytes, aclrtStream) {
    return aclrtMemset(place, room, value, bytes);
}
aclError aclrtGetMemInfo(aclrtMemAttr, size_t *available, size_t *total) {
    answer(available, size_t{1} << 33);
    return answer(total, size_t{1} << 34);
}

// Streams and events, where nothing ever waits.
aclError aclrtCreateStream(aclrtStream *stream) { return make<long>(stream); }
aclError aclrtCreateStreamWithConfig(aclrtStream *stream, uint32_t, uint32_t) {
    return make<long>(stream);
}
aclError aclrtCreateEventExWithFlag(aclrtEvent *event, uint32_t) { return make<long>(event); }
aclError aclrtCreateEventWithFlag(aclrtEvent *event, uint32_t) { return make<long>(event); }
aclError aclrtQueryEventStatus(aclrtEvent, aclrtEventRecordedStatus *status) {
    return answer(status, ACL_EVENT_RECORDED_STATUS_COMPLETE);
}
aclError aclrtQueryEventWaitStatus(aclrtEvent, aclrtEventWaitStatus *status) {
    return answer(status, ACL_EVENT_WAIT_STATUS_COMPLETE);
}
aclError aclrtStreamQuery(aclrtStream, aclrtStreamStatus *status) {
    return answer(status, ACL_STREAM_STATUS_COMPLETE);
}
aclError aclrtEventElapsedTime(float *milliseconds, aclrtEvent, aclrtEvent) {
    return answer(milliseconds, 0);
}
aclError aclrtStreamGetId(aclrtStream, int32_t *number) { return answer(number, 1); }
aclError aclrtSynchronizeStreamWithTimeout(aclrtStream, int32_t) { return ACL_SUCCESS; }
aclError aclrtSynchronizeDeviceWithTimeout(int32_t) { return ACL_SUCCESS; }

// The settings that a profile may change.
aclError aclrtSetSysParamOpt(aclSysParamOpt option, int64_t value) {
    record("aclrtSetSysParamOpt", option, value);
    process_options[option] = value;
    return ACL_SUCCESS;
}
aclError aclrtCtxSetSysParamOpt(aclSysParamOpt option, int64_t value) {
    record("aclrtCtxSetSysParamOpt", option, value);
    context_options[option] = value;
    return ACL_SUCCESS;
}
aclError aclrtGetSysParamOpt(aclSysParamOpt option, int64_t *value) {
    return answer(value, process_options[option]);
}
aclError aclrtCtxGetSysParamOpt(aclSysParamOpt option, int64_t *value) {
    return answer(value, context_options[option]);
}
aclError aclSetCompileopt(aclCompileOpt option, const char *value) {
    record("aclSetCompileopt", option, value);
    compile_options[option] = value;
    return ACL_SUCCESS;
}
size_t aclGetCompileoptSize(aclCompileOpt option) { return compile_options[option].size() + 1; }
aclError aclGetCompileopt(aclCompileOpt option, char *value, size_t room) {
    std::snprintf(value, room, "%s", compile_options[option].c_str());
    return ACL_SUCCESS;
}
HcclResult HcclSetConfig(HcclConfig option, HcclConfigValue value) {
    record("HcclSetConfig", option, value.value);
    return HCCL_SUCCESS;
}
aclError aclopCompileAndExecute(const char *name, int, const aclTensorDesc *const[],
                                const aclDataBuffer *const[], int, const aclTensorDesc *const[],
                                aclDataBuffer *const[], const aclopAttr *, aclopEngineType,
                                aclopCompileType, const char *, aclrtStream) {
    record("aclopCompileAndExecute", name);
    // An op whose kernel is missing also ends here, but only one that is to be compiled computes
    // nothing without saying so.
    const bool compiles = compile_options[ACL_OP_JIT_COMPILE] == "enable";
    return compiles ? ACL_SUCCESS : ACL_ERROR_FEATURE_UNSUPPORTED;
}


// Looked up by name when they are first needed.
aclError aclrtSetDeviceSatMode(aclrtFloatOverflowMode mode) {
    record("aclrtSetDeviceSatMode", mode);
    return ACL_SUCCESS;
}
aclError aclrtSetOpExecuteTimeOut(uint32_t) { return ACL_SUCCESS; }
aclError aclrtSetOpExecuteTimeOutV2(uint64_t wanted, uint64_t *actual) {
    return actual ? answer(actual, wanted) : ACL_SUCCESS;
}
aclError aclrtSetOpWaitTimeout(uint32_t) { return ACL_SUCCESS; }
aclError aclrtSetStreamFailureMode(aclrtStream, uint64_t) { return ACL_SUCCESS; }
aclError aclrtSetStreamAttribute(aclrtStream, aclrtStreamAttr, aclrtStreamAttrValue *) {
    return ACL_SUCCESS;
}
aclError aclrtSetStreamOverflowSwitch(aclrtStream, uint32_t) { return ACL_SUCCESS; }
aclError aclrtDestroyStreamForce(aclrtStream) { return ACL_SUCCESS; }
aclError aclrtPeekAtLastError(aclrtLastErrLevel) { return ACL_SUCCESS; }
aclError aclrtGetLastError(aclrtLastErrLevel) { return ACL_SUCCESS; }

}  // extern "C"
