// What FlashInfer's planner asks of CUDA, with an H200's answers; preloaded, so that no GPU is needed.

enum { SMEM_PER_BLOCK_OPTIN = 97, MULTIPROCESSORS = 16, MAJOR = 75, MINOR = 76 };

int cudaGetDevice(int* device) { return *device = 0; }

int cudaDeviceGetAttribute(int* value, int attribute, int device) {
  switch (attribute) {
    case SMEM_PER_BLOCK_OPTIN: *value = 232448; return 0;
    case MULTIPROCESSORS: *value = 132; return 0;
    case MAJOR: *value = 9; return 0;
    case MINOR: *value = 0; return 0;
    default: return 1;
  }
}

int cudaMemcpyAsync(void* to, const void* from, unsigned long size, int kind, void* stream) { return 0; }
