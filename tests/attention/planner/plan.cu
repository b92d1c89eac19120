// FlashInfer's own host planner for FlashAttention 2 inside CUDA graphs; asks nothing of a GPU but what gpu.c answers.
//
// On standard input: query heads, KV heads, head size, page size, tokens of the graph, bytes of room, whether keys stay
// whole, requests planned, then their cumulative query tokens and their cumulative pages. On standard output: the plan's
// numbers (PrefillPlanInfo::ToVector), and after each bar the requests of its pieces of work, their chunks, and keys in
// a chunk. What it would copy to the device goes into the file that is named.

#include <cstdint>
#include <cstdio>
#include <exception>
#include <flashinfer/attention/scheduler.cuh>
#include <fstream>
#include <iostream>
#include <vector>

int main(int count, char** arguments) {
  uint32_t heads, kv_heads, head_size, page, tokens, whole, requests;
  size_t room;
  std::cin >> heads >> kv_heads >> head_size >> page >> tokens >> room >> whole >> requests;
  std::vector<int32_t> query(requests + 1), pages(requests + 1);
  for (auto& each : query) std::cin >> each;
  for (auto& each : pages) std::cin >> each;
  if (!std::cin) return 2;

  const size_t size = 8 << 20;
  std::vector<char> device(size), host(size);
  flashinfer::PrefillPlanInfo plan;
  try {
    cudaError_t failed = flashinfer::PrefillPlan<int32_t>(
        reinterpret_cast<void*>(1 << 20), room, device.data(), host.data(), size, plan, query.data(), pages.data(),
        tokens, requests, heads, kv_heads, head_size, head_size, page, /*enable_cuda_graph=*/true, /*sizeof_dtype_o=*/2,
        /*window_left=*/-1, /*fixed_split_size=*/-1, /*disable_split_kv=*/whole != 0, /*num_colocated_ctas=*/0,
#ifdef UNIFORM_Q_LEN
        /*uniform_q_len=*/0,
#endif
        /*stream=*/nullptr);
    if (failed != cudaSuccess) return 3;
  } catch (const std::exception& error) {
    std::cerr << error.what();
    return 1;
  }
  auto ints = [&](int64_t offset) { return reinterpret_cast<int32_t*>(host.data() + offset); };
  // Without split-KV there is no such mask: all that is launched runs.
  auto valid = reinterpret_cast<bool*>(host.data() + plan.block_valid_mask_offset);
  for (auto number : plan.ToVector()) std::printf("%ld ", static_cast<long>(number));
  for (auto offset : {plan.request_indices_offset, plan.kv_tile_indices_offset}) {
    std::printf("| ");
    for (int64_t work = 0; work < plan.padded_batch_size; ++work)
      if (!plan.split_kv || valid[work]) std::printf("%d ", ints(offset)[work]);
  }
  std::printf("| %d\n", *ints(plan.kv_chunk_size_ptr_offset));
  if (count > 1) std::ofstream(arguments[1], std::ios::binary).write(host.data(), size);
}
