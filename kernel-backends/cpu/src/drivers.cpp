#include "drivers.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "pool.hpp"
#include "threads.hpp"

namespace tokenspeed {

namespace {

constexpr int64_t kPanelTokens = 1024;  // of one pass over a weight in panels: bounds the scratch that x takes
constexpr int64_t kRoundedGrain = 64;  // rows: what linear_rounded.hpp takes together

}  // namespace

void run_linear(const Weight& weight, const float* x, int64_t tokens, float* out) {
    if (tokens == 0 || weight.rows == 0) return;
    const KernelTable& table = kernels();
    // One token costs the unpacking of a weight (an eighth of a nanosecond), more tokens a multiply-add each.
    const double work = static_cast<double>(weight.rows) * static_cast<double>(weight.columns) *
                        (0.05 + 0.02 * static_cast<double>(tokens));
    const int64_t scratch_bytes = table.linear_scratch(weight);
    over_ranges(weight.rows, 16, threads_for(work), 2, [&](int64_t begin, int64_t end) {
        float* memory = static_cast<float*>(scratch(scratch_bytes));
        table.linear(weight, x, tokens, out, begin, end, memory);
    });
}

void run_rounded_linear(const Weight& weight, const float* x, int64_t tokens, float* out) {
    const RoundedProducts* products = kernels().rounded;
    if (products == nullptr || weight.format != WeightFormat::kBFloat16)
        throw std::logic_error(std::string("instruction set ") + kernels().name + " has no product of rounded activations" +
                               " with these weights");
    if (tokens == 0 || weight.rows == 0) return;
    const int64_t stride = products->stride(weight);
    // Every piece reads it; the pieces take no scratch of their own.
    auto* rounded = static_cast<uint16_t*>(scratch(tokens * stride * 2));
    over_ranges(tokens, 1, threads_for(static_cast<double>(tokens * stride) * 0.2), 2, [&](int64_t begin, int64_t end) {
        products->round_rows(weight, x + begin * weight.columns, end - begin, rounded + begin * stride);
    });
    const double work = static_cast<double>(weight.rows) * static_cast<double>(weight.columns) *
                        (0.05 + 0.01 * static_cast<double>(tokens));
    over_ranges(weight.rows, kRoundedGrain, threads_for(work), 2, [&](int64_t begin, int64_t end) {
        products->linear(weight, rounded, tokens, out, begin, end);
    });
}

namespace {

template <class Block>
void run_panels(const PanelProducts<Block>& products, const Panels& weight, const float* bias, const float* x, int64_t tokens,
                float* out) {
    const int64_t blocks = weight.columns / kPanelColumns;
    const int64_t panels = panels_of(weight.rows);
    for (int64_t first = 0; first < tokens && panels > 0; first += kPanelTokens) {
        const int64_t count = std::min(kPanelTokens, tokens - first);
        // Every piece reads it; the pieces take no scratch of their own.
        auto* quantised = static_cast<Block*>(scratch(count * blocks * static_cast<int64_t>(sizeof(Block))));
        const float* from = x + first * weight.columns;
        over_ranges(count, 1, threads_for(static_cast<double>(count * weight.columns) * 0.25), 2,
                    [&](int64_t begin, int64_t end) { products.quantise(weight, from, count, quantised, begin, end); });
        const double work = static_cast<double>(weight.rows) * static_cast<double>(weight.columns) *
                            (0.03 + 0.004 * static_cast<double>(count));
        over_ranges(panels, 1, threads_for(work), 2, [&](int64_t begin, int64_t end) {
            products.linear(weight, bias, quantised, count, out + first * weight.rows, begin, end);
        });
    }
}

}  // namespace

void run_panel_linear(const Panels& weight, const float* bias, const float* x, int64_t tokens, float* out, bool wide) {
    const Int8Products& products = *kernels().int8;
    if (wide)
        run_panels(products.wide, weight, bias, x, tokens, out);
    else
        run_panels(products.narrow, weight, bias, x, tokens, out);
}

void run_embedding(const Weight& weight, const int32_t* ids, int64_t tokens, float* out) {
    const KernelTable& table = kernels();
    const double work = static_cast<double>(tokens * weight.columns) * 0.2;
    over_ranges(tokens, 1, threads_for(work), 2, [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; ++t) table.decode_row(weight, ids[t], out + t * weight.columns);
    });
}

void run_rms_norm(const float* x, float* residual, const float* weight, float epsilon, float* out, int64_t rows,
                  int64_t size) {
    const KernelTable& table = kernels();
    over_ranges(rows, 1, threads_for(static_cast<double>(rows * size) * 0.2), 2, [&](int64_t begin, int64_t end) {
        table.rms_norm(x + begin * size, residual ? residual + begin * size : nullptr, weight, epsilon,
                       out + begin * size, end - begin, size);
    });
}

void run_silu_and_mul(const float* gate, int64_t gate_stride, const float* up, int64_t up_stride, float* out,
                      int64_t rows, int64_t size) {
    const KernelTable& table = kernels();
    over_ranges(rows, 1, threads_for(static_cast<double>(rows * size) * 0.5), 2, [&](int64_t begin, int64_t end) {
        table.silu_and_mul(gate + begin * gate_stride, gate_stride, up + begin * up_stride, up_stride,
                           out + begin * size, end - begin, size);
    });
}

void run_clamped_swiglu(const float* gate, int64_t gate_stride, const float* up, int64_t up_stride, float alpha, float limit,
                        float offset, float* out, int64_t rows, int64_t size) {
    const KernelTable& table = kernels();
    over_ranges(rows, 1, threads_for(static_cast<double>(rows * size) * 0.5), 2, [&](int64_t begin, int64_t end) {
        table.clamped_swiglu(gate + begin * gate_stride, gate_stride, up + begin * up_stride, up_stride, alpha, limit,
                             offset, out + begin * size, end - begin, size);
    });
}

void run_gelu_tanh_and_mul(const float* gate, int64_t gate_stride, const float* up, int64_t up_stride, float* out,
                           int64_t rows, int64_t size) {
    const KernelTable& table = kernels();
    over_ranges(rows, 1, threads_for(static_cast<double>(rows * size) * 0.5), 2, [&](int64_t begin, int64_t end) {
        table.gelu_tanh_and_mul(gate + begin * gate_stride, gate_stride, up + begin * up_stride, up_stride,
                                out + begin * size, end - begin, size);
    });
}

// The compiler's own vectors do: a row is read and written, and nothing else takes time.
void run_scale_rows(const float* x, const float* factors, const int32_t* places, float* out, int64_t rows, int64_t size) {
    over_ranges(rows, 1, threads_for(static_cast<double>(rows * size) * 0.2), 2, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
            const float factor = factors[places ? places[row] : 0];
            for (int64_t i = row * size; i < (row + 1) * size; ++i) out[i] = x[i] * factor;
        }
    });
}

void run_prologue(const Prologue& call, int64_t tokens) {
    const KernelTable& table = kernels();
    const double work = static_cast<double>(tokens * (call.q_heads + 2 * call.kv_heads) * call.cache.head_dim) * 0.5;
    over_ranges(tokens, 1, threads_for(work), 2,
                [&](int64_t begin, int64_t end) { table.prologue(call, begin, end); });
}

}  // namespace tokenspeed
