/* The calls of libcuda.so.1 that gpu_agent/catenary_agent/devices/cuda_driver.py makes, for one card that the environment
 * describes. Refuses what a real driver refuses: a call before cuInit, a device that is not there,
 * memory asked for without a current context. */
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

static int started, retained, pushed;

static long value(const char *name, long otherwise) {
  const char *text = getenv(name);
  return text ? atol(text) : otherwise;
}

int cuInit(unsigned flags) {
  if (flags != 0) return 1;
  started = 1;
  return (int)value("FAKE_INIT", 0);
}
int cuGetErrorString(int error, const char **text) {
  *text = error == 803 ? "system has unsupported display driver / cuda driver combination" : NULL;
  return *text ? 0 : 1;
}
int cuDriverGetVersion(int *version) {
  *version = (int)value("FAKE_CUDA", 13000);
  return 0;
}
int cuDeviceGetCount(int *count) {
  if (!started) return 3;
  *count = (int)value("FAKE_COUNT", 1);
  return 0;
}
int cuDeviceGet(int *device, int index) {
  if (index < 0 || index >= value("FAKE_COUNT", 1)) return 101;
  *device = index;
  return 0;
}
int cuDeviceGetName(char *name, int length, int device) {
  const char *text = getenv("FAKE_NAME");
  (void)device;
  strncpy(name, text ? text : "Tesla T4", (size_t)length - 1);
  name[length - 1] = 0;
  return 0;
}
int cuDeviceGetAttribute(int *result, int attribute, int device) {
  long capability = value("FAKE_CAPABILITY", 75);
  (void)device;
  if (attribute != 75 && attribute != 76) return 1;
  *result = (int)(attribute == 75 ? capability / 10 : capability % 10);
  return 0;
}
int cuDeviceGetUuid_v2(unsigned char *uuid, int device) {
  for (int each = 0; each < 16; each++) uuid[each] = (unsigned char)(16 * device + each);
  return 0;
}
int cuDeviceTotalMem_v2(size_t *bytes, int device) {
  (void)device;
  *bytes = (size_t)value("FAKE_TOTAL", 16000000000);
  return 0;
}
int cuDevicePrimaryCtxRetain(void **context, int device) {
  (void)device;
  *context = &retained;
  retained++;
  return (int)value("FAKE_CONTEXT", 0);
}
int cuCtxPushCurrent_v2(void *context) {
  if (context != &retained) return 201;
  pushed = 1;
  return 0;
}
int cuMemGetInfo_v2(size_t *free_bytes, size_t *total) {
  if (!pushed) return 201;
  *free_bytes = (size_t)value("FAKE_FREE", 15000000000);
  *total = (size_t)value("FAKE_TOTAL", 16000000000);
  return 0;
}
int cuCtxPopCurrent_v2(void **context) {
  *context = &retained;
  pushed = 0;
  return 0;
}
int cuDevicePrimaryCtxRelease_v2(int device) {
  (void)device;
  return --retained < 0 ? 201 : 0;
}
