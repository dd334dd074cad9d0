/* The calls of libnvidia-ml.so.1 that gpu_agent/catenary_agent/devices/nvml.py makes, for the cards
 * of fake_driver.c, in reverse order. Card 1 is one whose power limit nobody may ask for. */
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int started;
static char cards[2];

static int copied(char *target, unsigned length, const char *text) {
  if (!started) return 1;
  snprintf(target, length, "%s", text);
  return 0;
}

int nvmlInitWithFlags(unsigned flags) {
  (void)flags;
  started++;
  return getenv("FAKE_NVML_INIT") ? atoi(getenv("FAKE_NVML_INIT")) : 0;
}
int nvmlShutdown(void) { return --started < 0; }
const char *nvmlErrorString(int error) { return error == 9 ? "Driver Not Loaded" : "an error"; }
int nvmlSystemGetDriverVersion(char *version, unsigned length) {
  return copied(version, length, "580.65.06");
}
int nvmlDeviceGetHandleByUUID(const char *uuid, void **device) {
  if (!started) return 1;
  if (!strcmp(uuid, "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f")) *device = &cards[1];
  else if (!strcmp(uuid, "GPU-10111213-1415-1617-1819-1a1b1c1d1e1f")) *device = &cards[0];
  else return 6;
  return 0;
}
int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(void *device, void **whole) {
  (void)device;
  (void)whole;
  return 2;
}
int nvmlDeviceGetMemoryInfo(void *device, unsigned long long *memory) {
  (void)device;
  memory[0] = 16000000000ULL;
  memory[1] = 15500000000ULL;
  memory[2] = 500000000ULL;
  return 0;
}
int nvmlDeviceGetMaxPcieLinkGeneration(void *device, unsigned *generation) {
  *generation = device == &cards[1] ? 3 : 4;
  return 0;
}
int nvmlDeviceGetMaxPcieLinkWidth(void *device, unsigned *lanes) {
  (void)device;
  *lanes = 16;
  return 0;
}
int nvmlDeviceGetEnforcedPowerLimit(void *device, unsigned *milliwatts) {
  *milliwatts = 70000;
  return device == &cards[0] ? 4 : 0;
}
int nvmlDeviceGetMigMode(void *device, unsigned *now, unsigned *pending) {
  (void)device;
  *now = *pending = 0;
  return 0;
}
