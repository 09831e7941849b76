// Norms, activation and the reductions of the sampler. Each row is worked on alone, in one fixed order.

namespace tokenspeed::TOKENSPEED_ISA {
namespace {

// 1 / rms(x) over `size` elements; where given, the residual takes x first and is what counts.
inline float inverse_rms(const float* x, float* residual, float epsilon, int64_t size) {
    Vec squares = zero();
    for (int64_t i = 0; i < size; i += kLanes) {
        const int64_t count = smaller(kLanes, size - i);
        Vec value = load_first(x + i, count);
        if (residual) {
            value = add(load_first(residual + i, count), value);
            store_first(residual + i, value, count);
        }
        squares = fma(value, value, squares);
    }
    return 1.0f / square_root(sum(squares) / (float)size + epsilon);
}

void rms_norm(const float* x, float* residual, const float* weight, float epsilon, float* out, int64_t rows,
              int64_t size) {
    for (int64_t row = 0; row < rows; ++row) {
        const float* input = x + row * size;
        float* sums = residual ? residual + row * size : nullptr;
        const Vec factor = set(inverse_rms(input, sums, epsilon, size));
        const float* source = residual ? sums : input;
        for (int64_t i = 0; i < size; i += kLanes) {
            const int64_t count = smaller(kLanes, size - i);
            Vec value = mul(mul(load_first(source + i, count), factor), load_first(weight + i, count));
            store_first(out + row * size + i, value, count);
        }
    }
}

void silu_and_mul(const float* gate, int64_t gate_stride, const float* up, int64_t up_stride, float* out, int64_t rows,
                  int64_t size) {
    for (int64_t row = 0; row < rows; ++row) {
        for (int64_t i = 0; i < size; i += kLanes) {
            const int64_t count = smaller(kLanes, size - i);
            Vec x = load_first(gate + row * gate_stride + i, count);
            Vec denominator = add(set(1.0f), exponential(sub(zero(), x)));
            Vec value = mul(div(x, denominator), load_first(up + row * up_stride + i, count));
            store_first(out + row * size + i, value, count);
        }
    }
}

void clamped_swiglu(const float* gate, int64_t gate_stride, const float* up, int64_t up_stride, float alpha, float limit,
                    float offset, float* out, int64_t rows, int64_t size) {
    for (int64_t row = 0; row < rows; ++row) {
        for (int64_t i = 0; i < size; i += kLanes) {
            const int64_t count = smaller(kLanes, size - i);
            // The second operand of min and max survives a NaN.
            Vec g = min(set(limit), load_first(gate + row * gate_stride + i, count));
            Vec u = max(set(-limit), min(set(limit), load_first(up + row * up_stride + i, count)));
            Vec denominator = add(set(1.0f), exponential(mul(g, set(-alpha))));
            store_first(out + row * size + i, mul(div(g, denominator), add(u, set(offset))), count);
        }
    }
}

void gelu_tanh_and_mul(const float* gate, int64_t gate_stride, const float* up, int64_t up_stride, float* out,
                       int64_t rows, int64_t size) {
    constexpr float kTwice = 1.5957691216057308f;  // 2 sqrt(2 / pi)
    for (int64_t row = 0; row < rows; ++row) {
        for (int64_t i = 0; i < size; i += kLanes) {
            const int64_t count = smaller(kLanes, size - i);
            Vec x = load_first(gate + row * gate_stride + i, count);
            Vec inner = mul(x, fma(mul(x, x), set(0.044715f * kTwice), set(kTwice)));
            // 1 + tanh(a) = 2 / (1 + exp(-2a))
            Vec denominator = add(set(1.0f), exponential(sub(zero(), inner)));
            Vec value = mul(div(x, denominator), load_first(up + row * up_stride + i, count));
            store_first(out + row * size + i, value, count);
        }
    }
}

bool has_nan(const float* values, int64_t size) {
    for (int64_t i = 0; i < size; i += kLanes)
        if (any_nan(load_first(values + i, smaller(kLanes, size - i)))) return true;
    return false;
}

// NaN is passed over; -infinity where nothing else is there.
float maximum(const float* values, int64_t size) {
    Vec best = set(-__builtin_inff());
    const int64_t whole = size / kLanes * kLanes;
    for (int64_t i = 0; i < whole; i += kLanes) best = max(load(values + i), best);
    float result = TOKENSPEED_ISA::maximum(best);
    for (int64_t i = whole; i < size; ++i) result = values[i] > result ? values[i] : result;
    return result;
}

int64_t argmax(const float* values, int64_t size) {
    const float best = maximum(values, size);
    int64_t i = 0;
    while (i + kLanes <= size && !any_at_least(load(values + i), set(best))) i += kLanes;
    for (; i < size; ++i)
        if (values[i] == best) return i;
    return 0;
}

void shifted_exp(const float* values, float shift, float* out, int64_t size) {
    for (int64_t i = 0; i < size; i += kLanes) {
        const int64_t count = smaller(kLanes, size - i);
        store_first(out + i, exponential(sub(load_first(values + i, count), set(shift))), count);
    }
}

}  // namespace
}  // namespace tokenspeed::TOKENSPEED_ISA
