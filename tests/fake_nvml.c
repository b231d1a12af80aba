/* A small NVML, the library of NVIDIA's driver, with GPUs that tests describe in a file.
 *
 * The variable FAKE_NVML has the file's path. Each line is a GPU's UUID, a key and a number. A missing key means that
 * the GPU does not have the value (NVML_ERROR_NOT_SUPPORTED). The UUID "*" stands for the driver itself.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { SUCCESS = 0, NOT_SUPPORTED = 3, NOT_FOUND = 6, MAX_GPUS = 16, RECOVERY = 230 };

typedef struct { char uuid[64]; } Gpu;
typedef struct { unsigned long long total, free, used; } Memory;
typedef struct { unsigned pid; unsigned long long memory; unsigned instance, compute_instance; } Process;
typedef struct { unsigned char cluster[16]; int status; unsigned clique; unsigned char state; } Fabric;
typedef struct {
    unsigned field, scope; long long time, latency; unsigned type, code; unsigned long long value;
} FieldValue;
typedef struct { char legacy[16]; unsigned domain, bus, device, device_id, subsystem_id; char id[32]; } Pci;

static Gpu gpus[MAX_GPUS];

static int look(const char *uuid, const char *key, long long *value) {
    const char *path = getenv("FAKE_NVML");
    FILE *file = path ? fopen(path, "r") : NULL;
    char whose[64], what[64];
    long long number;
    int is_found = 0;
    while (file && fscanf(file, "%63s %63s %lld", whose, what, &number) == 3)
        if (!strcmp(whose, uuid) && !strcmp(what, key)) { *value = number; is_found = 1; }
    if (file) fclose(file);
    return is_found;
}

static int give(Gpu *gpu, const char *key, unsigned *value) {
    long long number;
    if (!look(gpu->uuid, key, &number)) return NOT_SUPPORTED;
    *value = (unsigned)number;
    return SUCCESS;
}

static int give_long(Gpu *gpu, const char *key, unsigned long long *value) {
    long long number;
    if (!look(gpu->uuid, key, &number)) return NOT_SUPPORTED;
    *value = (unsigned long long)number;
    return SUCCESS;
}

static int begin(const char *uuid) {
    long long number;
    while (look(uuid, "hangs", &number)) usleep(10000);
    return look(uuid, "code", &number) ? (int)number : SUCCESS;
}

int num_inits;

int nvmlInit_v2(void) { num_inits++; return begin("*"); }
int nvmlShutdown(void) { return SUCCESS; }

int nvmlDeviceGetHandleByUUID(const char *uuid, Gpu **gpu) {
    long long number;
    if (!look(uuid, "is", &number)) return NOT_FOUND;
    Gpu *place = gpus;
    while (place->uuid[0] && strcmp(place->uuid, uuid)) place++;
    strncpy(place->uuid, uuid, sizeof place->uuid - 1);
    *gpu = place;
    return begin(uuid);
}

int nvmlDeviceGetTotalEccErrors(Gpu *gpu, unsigned type, unsigned counter, unsigned long long *count) {
    return type == 1 && counter == 0 ? give_long(gpu, "ecc", count) : NOT_SUPPORTED;
}

int nvmlDeviceGetRemappedRows(Gpu *gpu, unsigned *right, unsigned *wrong, unsigned *pending, unsigned *failed) {
    *right = *wrong = 7;
    return give(gpu, "remap_pending", pending) || give(gpu, "remap_failed", failed) ? NOT_SUPPORTED : SUCCESS;
}

int nvmlDeviceGetRetiredPagesPendingStatus(Gpu *gpu, unsigned *pending) { return give(gpu, "retiring", pending); }

int nvmlDeviceGetCurrentClocksThrottleReasons(Gpu *gpu, unsigned long long *bits) {
    return give_long(gpu, "slowdowns", bits);
}

int nvmlDeviceGetUtilizationRates(Gpu *gpu, unsigned *rates) { return give(gpu, "busy", rates); }

int nvmlDeviceGetFieldValues(Gpu *gpu, int count, FieldValue *values) {
    for (int i = 0; i < count; i++) {
        unsigned value = 0;
        values[i].code = values[i].field == RECOVERY ? give(gpu, "recovery", &value) : NOT_SUPPORTED;
        values[i].value = value;
    }
    return SUCCESS;
}

int nvmlDeviceGetGpuFabricInfo(Gpu *gpu, Fabric *fabric) {
    unsigned state, status;
    if (give(gpu, "fabric", &state) || give(gpu, "fabric_status", &status)) return NOT_SUPPORTED;
    fabric->state = (unsigned char)state;
    fabric->status = (int)status;
    return SUCCESS;
}

int nvmlDeviceGetMemoryInfo(Gpu *gpu, Memory *memory) {
    if (give_long(gpu, "used", &memory->used) || give_long(gpu, "total", &memory->total)) return NOT_SUPPORTED;
    memory->free = memory->total - memory->used;
    return SUCCESS;
}

int nvmlDeviceGetComputeRunningProcesses_v3(Gpu *gpu, unsigned *count, Process *processes) {
    if (*count < 1 || give(gpu, "pid", &processes->pid)) { *count = 0; return SUCCESS; }
    if (give_long(gpu, "pid_memory", &processes->memory)) processes->memory = -1ULL;
    *count = 1;
    return SUCCESS;
}

int nvmlDeviceGetPciInfo_v3(Gpu *gpu, Pci *pci) {
    long long code;
    pci->domain = pci->device = 0;
    if (look(gpu->uuid, "address_code", &code)) return (int)code;
    return give(gpu, "bus", &pci->bus);
}

int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(Gpu *gpu, Gpu **whole) {
    long long number;
    if (strncmp(gpu->uuid, "MIG-", 4) || !look(gpu->uuid, "whole", &number)) return 2;
    char uuid[64];
    snprintf(uuid, sizeof uuid, "GPU-%lld", number);
    return nvmlDeviceGetHandleByUUID(uuid, whole);
}
