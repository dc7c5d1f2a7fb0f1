// The pattern of lse and delta in the backward, alone: a ring of two slots, filled by cp.async.bulk on a full mbarrier,
// read by four warps that wait for it and then arrive on the empty mbarrier which the producer waits for. It is
// ordered; compute-sanitizer's racecheck reports it all the same (docs/lab/backward.md). Built and run by hand:
//   nvcc -gencode=arch=compute_90a,code=sm_90a -o pattern racecheck_pattern.cu
//   compute-sanitizer --tool racecheck ./pattern
#include <cstdint>
#include <cstdio>

constexpr int kReaders = 128, kValues = 64, kSteps = 16, kBytes = kValues * sizeof(float);

__device__ uint32_t address(void const* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }
__device__ void init(uint64_t& barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address(&barrier)), "r"(arrivals) : "memory");
}
__device__ void arrive(uint64_t& barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address(&barrier)) : "memory");
}
__device__ void wait(uint64_t& barrier, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\nretry:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra finished;\nbra retry;\nfinished:\n}\n" ::"r"(address(&barrier)),
      "r"(parity)
      : "memory");
}
__device__ void load(uint64_t& full, float* slot, float const* source) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address(&full)), "r"(kBytes) : "memory");
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(address(slot)),
      "l"(source), "r"(kBytes), "r"(address(&full))
      : "memory");
}

__global__ void ring(float const* in, float* out) {
  __shared__ __align__(128) float values[2][kValues];
  __shared__ uint64_t full[2], empty[2];
  int const thread = static_cast<int>(threadIdx.x);
  if (thread == 0) {
    for (int s = 0; s < 2; ++s) {
      init(full[s], 1);
      init(empty[s], kReaders / 32);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  if (thread == kReaders) {
    for (int i = 0; i < kSteps; ++i) {
      wait(empty[i % 2], i / 2 % 2 ^ 1);
      load(full[i % 2], values[i % 2], in + i * kValues);
    }
  }
  if (thread >= kReaders) return;
  float sum = 0.f;
  for (int i = 0; i < kSteps; ++i) {
    wait(full[i % 2], i / 2 % 2);
    float2 const two = *reinterpret_cast<float2 const*>(values[i % 2] + thread % 32 * 2);
    sum += two.x + two.y;
    __syncwarp();
    if (thread % 32 == 0) arrive(empty[i % 2]);
  }
  out[thread] = sum;
}

int main() {
  float *in, *out;
  cudaMalloc(&in, kSteps * kBytes);
  cudaMalloc(&out, kReaders * sizeof(float));
  cudaMemset(in, 0, kSteps * kBytes);
  ring<<<1, kReaders + 32>>>(in, out);
  std::printf("%s\n", cudaGetErrorString(cudaDeviceSynchronize()));
}
