/* A stand-in for libnvidia-ml.so.1: two cards on NVLink, one with a foreign process and ECC errors. Only its interface is
 * NVIDIA's; FAKE_NVML_PID, FAKE_NVML_OURS and FAKE_NVML_FAIL in the environment say who is on the cards. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct { unsigned long long total, free, used; } memory_t;
typedef struct { unsigned int pid; unsigned long long used; unsigned int gpu, compute; } process_t;
static char cards[2];

static int index_of(void *device) { return (int)((char *)device - cards); }
static unsigned int pid_of(const char *name) { return getenv(name) ? (unsigned int)atoi(getenv(name)) : 0; }

int nvmlInit_v2(void) { return getenv("FAKE_NVML_FAIL") ? 999 : 0; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned int *count) { *count = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned int index, void **device) { *device = &cards[index]; return 0; }
int nvmlSystemGetDriverVersion(char *text, unsigned int size) { snprintf(text, size, "580.65.06"); return 0; }
int nvmlSystemGetCudaDriverVersion_v2(int *version) { *version = 13000; return 0; }
int nvmlDeviceGetName(void *device, char *text, unsigned int size) { snprintf(text, size, "NVIDIA H200"); return 0; }
int nvmlDeviceGetUUID(void *device, char *text, unsigned int size) {
    snprintf(text, size, "GPU-%d", index_of(device));
    return 0;
}
int nvmlDeviceGetCudaComputeCapability(void *device, int *major, int *minor) { *major = 9; *minor = 0; return 0; }
int nvmlDeviceGetMemoryInfo(void *device, memory_t *memory) {
    memory->total = 150000000000ULL;
    memory->used = pid_of(index_of(device) ? "FAKE_NVML_PID" : "FAKE_NVML_OURS") ? 60000000000ULL : 500000000ULL;
    memory->free = memory->total - memory->used;
    return 0;
}
int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned int *count, process_t *found) {
    unsigned int pid = pid_of(index_of(device) ? "FAKE_NVML_PID" : "FAKE_NVML_OURS");
    unsigned int there = pid ? 20 : 0; /* more than the first question has room for */
    if (*count < there) { *count = there; return 7; }
    for (unsigned int i = 0; i < there; i++) found[i] = (process_t){i ? 4000000 + i : pid, i ? ~0ULL : 59000000000ULL, 0, 0};
    *count = there;
    return 0;
}
int nvmlDeviceGetPersistenceMode(void *device, unsigned int *mode) { *mode = 1; return 0; }
int nvmlDeviceGetTotalEccErrors(void *device, int type, int counter, unsigned long long *count) {
    if (type != 1 || counter != 0) return 2;
    *count = index_of(device) ? 3 : 0;
    return 0;
}
int nvmlDeviceGetRemappedRows(void *device, unsigned *corrected, unsigned *uncorrected, unsigned *pending, unsigned *failed) {
    *corrected = *uncorrected = *failed = 0;
    *pending = index_of(device) == 1;
    return 0;
}
int nvmlDeviceGetP2PStatus(void *a, void *b, int what, unsigned int *status) { *status = 0; return 0; }
