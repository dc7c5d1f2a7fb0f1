// Launches of the quantiser for one element type. Before it: src/quantize_dispatch.cpp, which filled the arguments.
// After it: rows.hpp, values.hpp, column_means.hpp.
#pragma once

#include "core/launch.hpp"
#include "quantize/column_means.hpp"
#include "quantize/rows.hpp"
#include "quantize/values.hpp"

namespace flashhopper {

template <class Element, int kDim>
cudaError_t launch_rows(RowsArgs const& args, int num_sms, int device, cudaStream_t stream, Start start) {
  int const tasks = args.operands[0].blocks.tasks + args.operands[1].blocks.tasks;
  if (tasks == 0) return cudaSuccess;
  void* parameters[] = {const_cast<RowsArgs*>(&args)};
  auto const run = [&]<Rotation kRotation, bool kSmooth>() {
    using Shape = RowsShape<kDim, kRotation, kSmooth>;
    int const grid = min_of(tasks, Shape::kCtas * num_sms);
    return launch<quantize_rows_kernel<Element, kDim, kSmooth, kRotation>>(grid, Shape::kThreads, parameters,
                                                                           Shape::kSmemBytes, device, stream, start);
  };
  auto const run_rotation = [&]<Rotation kRotation>() {
    return args.operands[0].mean != nullptr ? run.template operator()<kRotation, true>()
                                            : run.template operator()<kRotation, false>();
  };
  if (args.signs == nullptr) return run_rotation.template operator()<Rotation::kNone>();
  return args.is_by_quads ? run_rotation.template operator()<Rotation::kQuads>()
                          : run_rotation.template operator()<Rotation::kWide>();
}

template <class Element, int kDim>
cudaError_t launch_values(ValuesArgs const& args, int num_sms, int device, cudaStream_t stream, Start start) {
  using Shape = ValuesShape<kDim>;
  if (args.blocks.tasks == 0) return cudaSuccess;
  int const grid = min_of(args.blocks.tasks, Shape::kCtas * num_sms);
  void* parameters[] = {const_cast<ValuesArgs*>(&args)};
  auto const run = [&]<bool kCenter>() {
    return launch<quantize_values_kernel<Element, kDim, kCenter>>(grid, Shape::kThreads, parameters, Shape::kSmemBytes,
                                                                  device, stream, start);
  };
  return args.mean != nullptr ? run.template operator()<true>() : run.template operator()<false>();
}

template <class Element>
cudaError_t launch_column_means(MeansArgs const& args, int device, cudaStream_t stream) {
  int const heads = args.operands[0].batch_heads + args.operands[1].batch_heads;
  if (heads == 0) return cudaSuccess;
  void* parameters[] = {const_cast<MeansArgs*>(&args)};
  return launch<column_means_kernel<Element>>(heads * kMeanCtas, kMeanThreads, parameters, 0, device, stream,
                                              Start::kWithPrevious, kMeanCtas);
}

}  // namespace flashhopper
