#include "recurrent.hpp"

#include "addresses.hpp"
#include "pool.hpp"
#include "recording.hpp"
#include "table.hpp"
#include "threads.hpp"

namespace nb = nanobind;

namespace tokenspeed {

namespace {

constexpr int64_t kConvGrain = 64;  // channels: whole vectors and whole lines of the caches

// Tokens of all rows. What starts holds may differ at every replay of a recorded call.
int64_t tokens_of(const StateRows& rows) { return rows.count ? rows.starts[rows.count] - rows.starts[0] : 0; }

}  // namespace

void run_causal_conv(const CausalConv& call) {
    const KernelTable& table = kernels();
    const double work = static_cast<double>(tokens_of(call.rows) * call.channels * (call.width + 4)) * 0.1;
    over_ranges(call.channels, kConvGrain, threads_for(work), 2,
                [&](int64_t begin, int64_t end) { table.recurrent.causal_conv(call, begin, end); });
}

void run_gated_delta(const GatedDelta& call) {
    const KernelTable& table = kernels();
    const double each = static_cast<double>(call.key_dim * call.value_dim) * 0.1;
    const double work = static_cast<double>(tokens_of(call.rows) * call.value_heads) * each;
    const int64_t bytes = delta_scratch(call.key_dim, call.value_dim) * static_cast<int64_t>(sizeof(float));
    over_ranges(call.rows.count * call.value_heads, 1, threads_for(work), 4, [&](int64_t begin, int64_t end) {
        table.recurrent.gated_delta(call, begin, end, static_cast<float*>(scratch(bytes)));
    });
}

void run_gated_norm(const GatedNorm& call, int64_t tokens) {
    const KernelTable& table = kernels();
    const int64_t heads = tokens * call.heads;
    over_ranges(heads, 1, threads_for(static_cast<double>(heads * call.dim) * 0.5), 2,
                [&](int64_t begin, int64_t end) { table.recurrent.gated_norm(call, begin, end); });
}

void run_sigmoid_gate(const float* x, const float* gate, int64_t gate_stride, float* out, int64_t rows, int64_t size,
                      int64_t gates) {
    const KernelTable& table = kernels();
    over_ranges(rows, 1, threads_for(static_cast<double>(rows * size) * 0.5), 2, [&](int64_t begin, int64_t end) {
        table.recurrent.sigmoid_gate(x + begin * size, gate + begin * gate_stride, gate_stride, out + begin * size,
                                     end - begin, size, gates);
    });
}

void run_add(const float* x, float* out, int64_t size) {
    const KernelTable& table = kernels();
    over_ranges(size, 1024, threads_for(static_cast<double>(size) * 0.1), 2,
                [&](int64_t begin, int64_t end) { table.recurrent.add(x + begin, out + begin, end - begin); });
}

namespace {

using Strided = nb::tuple;  // an address and the elements between tokens, or an address, those between blocks and heads

TokenPart part(const Strided& given) {
    return {at<const float>(nb::cast<Address>(given[0])), nb::cast<int64_t>(given[1])};
}

StatePlane plane(const Strided& given) {
    return {at<float>(nb::cast<Address>(given[0])), nb::cast<int64_t>(given[1]), nb::cast<int64_t>(given[2])};
}

// Three addresses and how many rows there are.
StateRows rows_of(const nb::tuple& given) {
    return {at<const int32_t>(nb::cast<Address>(given[0])), at<const int32_t>(nb::cast<Address>(given[1])),
            at<const int32_t>(nb::cast<Address>(given[2])), nb::cast<int64_t>(given[3])};
}

void causal_conv(const Strided& x, int64_t channels, int64_t width, Address weight, Address bias, const Strided& state,
                 const nb::tuple& rows, Address out) {
    const TokenPart input = part(x);
    const CausalConv call{input.data,
                          input.token_stride,
                          channels,
                          width,
                          at<const float>(weight),
                          at<const float>(bias),
                          plane(state),
                          rows_of(rows),
                          at<float>(out)};
    nb::gil_scoped_release released;
    make_call([call] { run_causal_conv(call); });
}

void gated_delta(const Strided& q, const Strided& k, const Strided& v, const Strided& decay, const Strided& beta,
                 Address rate, Address bias, int64_t key_heads, int64_t value_heads, int64_t key_dim, int64_t value_dim,
                 bool channel_decay, float epsilon, const Strided& state, const nb::tuple& rows, Address out) {
    const GatedDelta call{part(q),
                          part(k),
                          part(v),
                          part(decay),
                          part(beta),
                          at<const float>(rate),
                          at<const float>(bias),
                          key_heads,
                          value_heads,
                          key_dim,
                          value_dim,
                          channel_decay,
                          epsilon,
                          plane(state),
                          rows_of(rows),
                          at<float>(out)};
    nb::gil_scoped_release released;
    make_call([call] { run_gated_delta(call); });
}

void gated_norm(Address x, const Strided& gate, Address weight, float epsilon, bool silu, Address out, int64_t tokens,
                int64_t heads, int64_t dim) {
    const GatedNorm call{at<const float>(x), part(gate), at<const float>(weight), epsilon, silu, at<float>(out), heads,
                         dim};
    nb::gil_scoped_release released;
    make_call([call, tokens] { run_gated_norm(call, tokens); });
}

void sigmoid_gate(Address x, const Strided& gate, Address out, int64_t rows, int64_t size, int64_t gates) {
    const TokenPart opened = part(gate);
    nb::gil_scoped_release released;
    make_call([=] {
        run_sigmoid_gate(at<const float>(x), opened.data, opened.token_stride, at<float>(out), rows, size, gates);
    });
}

void add(Address x, Address out, int64_t size) {
    nb::gil_scoped_release released;
    make_call([=] { run_add(at<const float>(x), at<float>(out), size); });
}

}  // namespace

void bind_recurrent(nb::module_& m) {
    m.def("causal_conv", &causal_conv);
    m.def("gated_delta", &gated_delta);
    m.def("gated_norm", &gated_norm);
    m.def("sigmoid_gate", &sigmoid_gate);
    m.def("add", &add);
}

}  // namespace tokenspeed
