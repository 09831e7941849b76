#include "packed_matrix.hpp"

#include <nanobind/stl/string.h>

#include <stdexcept>
#include <string>

#include "addresses.hpp"
#include "drivers.hpp"
#include "packing.hpp"
#include "recording.hpp"
#include "weight_formats.hpp"

namespace tokenspeed {

namespace nb = nanobind;
using namespace nb::literals;

namespace {

// A weight matrix in panels, which it owns; what it was packed from is not kept.
class PackedMatrix {
public:
    PackedMatrix(const std::string& format, int64_t rows, int64_t columns, Address data) {
        const Weight weight = weight_at(format, rows, columns, reinterpret_cast<const uint8_t*>(data), nullptr);
        if (panel_layout(weight.format).bits == 0)
            throw std::invalid_argument("weight format '" + format + "' is not packed for quantised activations");
        quant_bytes_ = all_quant_bytes(weight.format, rows, columns);
        bytes_ = quant_bytes_ + all_scale_bytes(weight.format, rows, columns);
        memory_ = weight_memory(bytes_);
        panels_ = {weight.format, rows, columns, memory_.get(), memory_.get() + quant_bytes_};
        nb::gil_scoped_release released;
        pack_panels(weight, memory_.get(), memory_.get() + quant_bytes_);
    }

    int64_t bytes() const { return bytes_; }

    void multiply(Address x, int64_t tokens, Address out, Address bias, bool wide) const {
        nb::gil_scoped_release released;
        make_call([panels = panels_, x, tokens, out, bias, wide] {
            run_panel_linear(panels, reinterpret_cast<const float*>(bias), reinterpret_cast<const float*>(x), tokens,
                             reinterpret_cast<float*>(out), wide);
        });
    }

private:
    Panels panels_{};
    std::shared_ptr<uint8_t> memory_;
    int64_t quant_bytes_ = 0;
    int64_t bytes_ = 0;
};

}  // namespace

void bind_packed_matrix(nb::module_& m) {
    nb::class_<PackedMatrix>(m, "PackedMatrix", "A weight matrix packed for products with activations in 8 or 15 bits.")
        .def(nb::init<const std::string&, int64_t, int64_t, Address>(), "format"_a, "rows"_a, "columns"_a, "data"_a)
        .def_prop_ro("nbytes", &PackedMatrix::bytes)
        .def("multiply", &PackedMatrix::multiply, "x"_a, "tokens"_a, "out"_a, "bias"_a, "wide"_a);
    m.def(
        "read_all",
        [](Address data, int64_t bytes) {
            nb::gil_scoped_release released;
            return read_all(reinterpret_cast<const uint8_t*>(data), bytes);
        },
        "data"_a, "bytes"_a, "Reads a multiple of 64 bytes with all threads; their sum as 64-bit words.");
    m.def(
        "release_mapped",
        [](Address data, int64_t bytes) { return release_mapped(reinterpret_cast<const uint8_t*>(data), bytes); }, "data"_a,
        "bytes"_a, "Gives back the resident pages of a shared file mapping; returns their bytes, 0 for other memory.");
}

}  // namespace tokenspeed
