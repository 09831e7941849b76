// The Python door. Tensors come as raw addresses and sizes: this module knows nothing of torch, and a call costs a fraction
// of a microsecond. The Python files beside it keep the tensors alive and, where asked to, check them.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <string>

#include "addresses.hpp"
#include "compressed.hpp"
#include "drivers.hpp"
#include "expanded.hpp"
#include "head_linear.hpp"
#include "index.hpp"
#include "latent.hpp"
#include "moe.hpp"
#include "packed_matrix.hpp"
#include "pool.hpp"
#include "recording.hpp"
#include "recurrent.hpp"
#include "sampling.hpp"
#include "threads.hpp"
#include "tiles.hpp"
#include "weight_formats.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace tokenspeed {
namespace {

// Runs `body` without the GIL where it is worth handing over: another thread may keep it for a whole switch interval,
// which is far longer than a small kernel. `body` holds its arguments by value: it may be recorded.
template <class Body>
void run(int64_t elements, const Body& body) {
    constexpr int64_t kWorthReleasing = 32'768;
    if (elements < kWorthReleasing) return make_call(body);
    nb::gil_scoped_release released;
    make_call(body);
}
constexpr int64_t kMany = INT64_MAX;  // elements of a kernel that is always worth it

// A weight matrix in one of the formats, not owned.
class Matrix {
public:
    Matrix(const std::string& format, int64_t rows, int64_t columns, Address data, Address bias)
        : weight_(weight_at(format, rows, columns, at<const uint8_t>(data), at<const float>(bias))) {}

    void multiply(Address x, int64_t tokens, Address out) const {
        run(kMany, [weight = weight_, x, tokens, out] { run_linear(weight, at<const float>(x), tokens, at<float>(out)); });
    }

    void multiply_rounded(Address x, int64_t tokens, Address out) const {
        run(kMany, [weight = weight_, x, tokens, out] {
            run_rounded_linear(weight, at<const float>(x), tokens, at<float>(out));
        });
    }

    void multiply_tiled(Address x, int64_t tokens, Address out, bool emulated) const {
        run(kMany, [weight = weight_, x, tokens, out, emulated] {
            run_tiled_linear(weight, at<const float>(x), tokens, at<float>(out), emulated);
        });
    }

    void lookup(Address ids, int64_t tokens, Address out) const {
        run(tokens * weight_.columns,
            [weight = weight_, ids, tokens, out] { run_embedding(weight, at<const int32_t>(ids), tokens, at<float>(out)); });
    }

    // Strides in elements; a head's elements lie together.
    void multiply_heads(int64_t heads, int64_t skipped, Address x, int64_t x_token, int64_t x_head, int64_t tokens, Address out,
                        int64_t out_token, int64_t out_head) const {
        run(kMany, [weight = weight_, heads, skipped, x, x_token, x_head, tokens, out, out_token, out_head] {
            run_head_linear(weight, heads, skipped, {at<const float>(x), x_token, x_head}, tokens,
                            {at<float>(out), out_token, out_head});
        });
    }

    const Weight& weight() const { return weight_; }

private:
    Weight weight_;
};

// How tokens go to experts; the correction is not owned.
class Router {
public:
    Router(int64_t experts, int64_t top_k, Scoring scoring, int64_t groups, int64_t top_groups, bool renormalise, float scale,
           Address correction)
        : routing_{experts, top_k, scoring, groups, top_groups, renormalise, scale, at<const float>(correction)} {}

    void route(Address logits, int64_t rows, Address ids, Address weights) const {
        run(rows * routing_.experts,
            [routing = routing_, logits, rows, ids, weights] {
                run_route(routing, at<const float>(logits), rows, at<int32_t>(ids), at<float>(weights));
            });
    }

private:
    Routing routing_;
};

// The experts of a layer; weights and biases are not owned.
class Mixture {
public:
    // limit 0: silu, which has neither alpha nor limit nor offset.
    Mixture(const Matrix& gate_up, const Matrix& down, Address gate_up_bias, Address down_bias, float alpha, float limit,
            float offset, bool rounded)
        : experts_{gate_up.weight(),
                   down.weight(),
                   at<const float>(gate_up_bias),
                   at<const float>(down_bias),
                   limit > 0.0f ? GatedActivation::kClampedSwiglu : GatedActivation::kSilu,
                   alpha,
                   limit,
                   offset,
                   rounded} {}

    void apply(Address x, Address ids, Address weights, int64_t tokens, int64_t top_k, Address out) const {
        run(kMany, [experts = experts_, x, ids, weights, tokens, top_k, out] {
            run_experts(experts, at<const float>(x), at<const int32_t>(ids), at<const float>(weights), tokens, top_k,
                        at<float>(out));
        });
    }

private:
    Experts experts_;
};

using Strides = nb::tuple;  // of a cache plane, in elements: block, head, token, 1

CachePlane plane(Address data, const Strides& strides) {
    return {at<uint8_t>(data), nb::cast<int64_t>(strides[0]), nb::cast<int64_t>(strides[1]),
            nb::cast<int64_t>(strides[2])};
}

void gqa_prologue(Address q, int64_t q_stride, int64_t q_heads, Address k, int64_t k_stride, int64_t kv_heads, Address v,
                  int64_t v_stride, int64_t tokens, int64_t head_dim, Address positions, Address cos_sin,
                  int64_t rotary_dim, Address q_norm, Address k_norm, float epsilon, KvType type, Address keys, const Strides& key_strides, Address values,
                  const Strides& value_strides, int64_t page_size, Address slots) {
    const Cache cache{plane(keys, key_strides), plane(values, value_strides), type, page_size, head_dim};
    const Prologue call{at<float>(q),
                        at<const float>(k),
                        at<const float>(v),
                        q_stride,
                        k_stride,
                        v_stride,
                        q_heads,
                        kv_heads,
                        at<const int32_t>(positions),
                        at<const float>(cos_sin),
                        rotary_dim,
                        at<const float>(q_norm),
                        at<const float>(k_norm),
                        epsilon,
                        at<const int64_t>(slots),
                        cache};
    run(tokens * (q_heads + 2 * kv_heads) * head_dim, [call, tokens] { run_prologue(call, tokens); });
}

// query_start 0: every sequence has queries_each tokens. window 0: no window. sinks 0: none. soft_cap 0: no cap.
void attend(Address q, int64_t q_stride, int64_t q_heads, int64_t kv_heads, int64_t head_dim, KvType type, Address keys,
            const Strides& key_strides, Address values, const Strides& value_strides, int64_t page_size,
            Address page_table, int64_t page_table_stride, Address query_start, int64_t queries_each, Address lengths,
            int64_t sequences, float scale, int64_t window, bool rounded, Address out, Address sinks, float soft_cap) {
    const Attention call{{{at<const float>(q), q_stride, head_dim, head_dim}, {}},
                         sequences * queries_each,
                         at<float>(out),
                         nullptr,
                         q_heads,
                         kv_heads,
                         head_dim,
                         {plane(keys, key_strides), plane(values, value_strides), type, page_size, head_dim},
                         at<const int32_t>(page_table),
                         page_table_stride,
                         at<const int32_t>(query_start),
                         queries_each,
                         at<const int32_t>(lengths),
                         sequences,
                         scale,
                         window,
                         1,
                         rounded,
                         at<const float>(sinks),
                         soft_cap};
    run(kMany, [call] { run_attention(call); });
}

void rms_norm(Address x, Address residual, Address weight, float epsilon, Address out, int64_t rows, int64_t size) {
    run(rows * size, [=] {
        run_rms_norm(at<const float>(x), at<float>(residual), at<const float>(weight), epsilon, at<float>(out), rows, size);
    });
}

void silu_and_mul(Address gate, int64_t gate_stride, Address up, int64_t up_stride, Address out, int64_t rows, int64_t size) {
    run(rows * size, [=] {
        run_silu_and_mul(at<const float>(gate), gate_stride, at<const float>(up), up_stride, at<float>(out), rows, size);
    });
}

void table_route(Address logits, Address tokens, int64_t rows, Address table, int64_t experts, int64_t top_k, float scale,
                 Address ids, Address weights) {
    const TableRouting call{at<const float>(logits), at<const int32_t>(tokens), at<const int32_t>(table), experts, top_k,
                            scale, at<int32_t>(ids), at<float>(weights)};
    run(rows * experts, [call, rows] { run_table_route(call, rows); });
}

void clamped_swiglu(Address gate, int64_t gate_stride, Address up, int64_t up_stride, float alpha, float limit, float offset,
                    Address out, int64_t rows, int64_t size) {
    run(rows * size, [=] {
        run_clamped_swiglu(at<const float>(gate), gate_stride, at<const float>(up), up_stride, alpha, limit, offset,
                           at<float>(out), rows, size);
    });
}

void gelu_tanh_and_mul(Address gate, int64_t gate_stride, Address up, int64_t up_stride, Address out, int64_t rows,
                       int64_t size) {
    run(rows * size, [=] {
        run_gelu_tanh_and_mul(at<const float>(gate), gate_stride, at<const float>(up), up_stride, at<float>(out), rows, size);
    });
}

// places 0: every row takes the first factor.
void scale_rows(Address x, Address factors, Address places, Address out, int64_t rows, int64_t size) {
    run(rows * size, [=] {
        run_scale_rows(at<const float>(x), at<const float>(factors), at<const int32_t>(places), at<float>(out), rows, size);
    });
}

}  // namespace
}  // namespace tokenspeed

NB_MODULE(_native, m) {
    using namespace tokenspeed;

    m.doc() = "Native CPU kernels. Arguments are addresses and sizes and are trusted; see the Python wrappers.";
    m.def("instruction_set", [] { return kernels().name; }, "The instruction set in force.");
    m.def("has_instruction_set", [](const std::string& name) { return has_instruction_set(name.c_str()); }, "name"_a);
    m.def(
        "choose_instruction_set",
        [](const std::string& name) {
            if (!choose_instruction_set(name.c_str()))
                throw std::invalid_argument("instruction set '" + name + "' is not in this build or not on this machine");
        },
        "name"_a, "Puts a set in force for the whole process; ValueError where it cannot be. Not while kernels run.");
    m.def("set_thread_limit", &set_thread_limit, "count"_a, "The most threads a kernel uses, at least 1.");
    m.def("set_thread_places", &set_thread_places, "cpus"_a, "See pool.hpp.");
    m.def("thread_limit", &thread_limit, "The most threads a kernel uses.");

    nb::class_<Recording>(m, "Recording", "Kernel calls that are made again by one; who holds it keeps their memory alive.")
        .def(nb::init<>())
        .def("begin", [](Recording& recording) { current_recording = &recording; },
             "From here on this thread's kernel calls are noted as they are made.")
        .def("end", [](Recording&) { current_recording = nullptr; })
        .def("replay", &Recording::replay, nb::call_guard<nb::gil_scoped_release>())
        .def("__len__", &Recording::size);

    m.def("enable_amx", &enable_amx, "Asks for the tile unit; RuntimeError where there is none.");

    nb::class_<Matrix>(m, "Matrix", "A weight matrix that lies elsewhere; who binds it keeps the memory alive.")
        .def(nb::init<const std::string&, int64_t, int64_t, Address, Address>(), "format"_a, "rows"_a, "columns"_a,
             "data"_a, "bias"_a)
        .def("multiply", &Matrix::multiply, "x"_a, "tokens"_a, "out"_a)
        .def("multiply_rounded", &Matrix::multiply_rounded, "x"_a, "tokens"_a, "out"_a)
        .def("multiply_heads", &Matrix::multiply_heads, "heads"_a, "skipped"_a, "x"_a, "x_token"_a, "x_head"_a,
             "tokens"_a, "out"_a, "out_token"_a, "out_head"_a)
        .def("multiply_tiled", &Matrix::multiply_tiled, "x"_a, "tokens"_a, "out"_a, "emulated"_a)
        .def("lookup", &Matrix::lookup, "ids"_a, "tokens"_a, "out"_a);

    nb::enum_<KvType>(m, "KvType", "Element types of a cache.")
        .value("float32", KvType::kFloat32)
        .value("bfloat16", KvType::kBFloat16)
        .value("float16", KvType::kFloat16)
        .value("e4m3", KvType::kE4M3);
    m.attr("MAX_HEAD_DIM") = kMaxHeadDim;
    m.attr("MAX_Q_PER_KV") = kMaxTileRows;
    m.def("gqa_prologue", &gqa_prologue);
    m.def("attend", &attend);

    m.def("rms_norm", &rms_norm, "x"_a, "residual"_a, "weight"_a, "epsilon"_a, "out"_a, "rows"_a, "size"_a);
    m.def("silu_and_mul", &silu_and_mul, "gate"_a, "gate_stride"_a, "up"_a, "up_stride"_a, "out"_a, "rows"_a, "size"_a);
    m.def("clamped_swiglu", &clamped_swiglu);
    m.def("gelu_tanh_and_mul", &gelu_tanh_and_mul);
    m.def("scale_rows", &scale_rows);

    nb::enum_<Scoring>(m, "Scoring", "How logits become scores.")
        .value("softmax", Scoring::kSoftmax)
        .value("sigmoid", Scoring::kSigmoid)
        .value("sqrtsoftplus", Scoring::kSqrtSoftplus);
    m.def("table_route", &table_route);
    nb::class_<Router>(m, "Router", "How tokens go to experts.")
        .def(nb::init<int64_t, int64_t, Scoring, int64_t, int64_t, bool, float, Address>(), "experts"_a, "top_k"_a, "scoring"_a,
             "groups"_a, "top_groups"_a, "renormalise"_a, "scale"_a, "correction"_a)
        .def("route", &Router::route, "logits"_a, "rows"_a, "ids"_a, "weights"_a);
    nb::class_<Mixture>(m, "Mixture", "The experts of a layer, whose weights and biases lie elsewhere.")
        .def(nb::init<const Matrix&, const Matrix&, Address, Address, float, float, float, bool>(), "gate_up"_a, "down"_a,
             "gate_up_bias"_a, "down_bias"_a, "alpha"_a, "limit"_a, "offset"_a, "rounded"_a)
        .def("apply", &Mixture::apply, "x"_a, "ids"_a, "weights"_a, "tokens"_a, "top_k"_a, "out"_a);
    bind_sampling(m);
    bind_packed_matrix(m);
    bind_latent(m);
    bind_expanded(m);
    bind_recurrent(m);
    bind_index(m);
    bind_compressed(m);
    bind_streams(m);
}
