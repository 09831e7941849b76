// gemm.head_linear: a matrix for each head. Contract: tokenspeed_kernel/ops/gemm.py.
#pragma once

#include <cstdint>

#include "table.hpp"

namespace tokenspeed {

// Rows of elements that lie together: element 0 of a token's head is at data + token * token_stride + head * head_stride.
template <class T>
struct HeadRows {
    T* data;
    int64_t token_stride, head_stride;  // in elements

    T* at(int64_t token, int64_t head) const { return data + token * token_stride + head * head_stride; }
};

// out[t, h] = the rows of head h, of which there are weight.rows / heads, without the first `skipped`, times x[t, h]. Throws
// std::bad_alloc.
void run_head_linear(const Weight& weight, int64_t heads, int64_t skipped, HeadRows<const float> x, int64_t tokens,
                     HeadRows<float> out);

}  // namespace tokenspeed
