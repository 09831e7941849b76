// Bytes become a configuration and a stream of events: submissions, rounds, results that land, fail or repeat, operations
// that end in any order or fail, ends, ticks, what peers report, and calls that must be refused. All invariants after every
// event, every token checked; in the end everything must end and the pools be whole.
//
// Built by clang it is a libFuzzer target ("make fuzz"); built otherwise it plays the files and folders that it is given, which
// is how CTest keeps the seeds alive under g++, and "--random COUNT" plays as many streams of random bytes.
#define CHECK_HAS_OWN_MAIN
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>

#include "dealt_events.h"

using namespace tokenspeed;
using dealer::Deal;
using dealer::Engine;

namespace {

constexpr int kHandles = 12;
constexpr int kMostEvents = 400;

class Bytes {
public:
    Bytes(const std::uint8_t* data, std::size_t size) : data_(data), size_(size) {}
    bool empty() const { return at_ >= size_; }
    int next() { return empty() ? 0 : data_[at_++]; }
    int draw(int from, int to) { return from + next() % (to - from + 1); }

private:
    const std::uint8_t* data_;
    std::size_t size_;
    std::size_t at_ = 0;
};

engine::ConfigOptions options_from(Bytes& bytes) {
    engine::ConfigOptions options;
    const int switches = bytes.next(), kinds = bytes.next();
    options.overlap = switches & 1;
    options.mixed = (switches & 2) == 0;
    options.prefix_cache = (switches & 4) == 0;
    options.host_cache = (switches & 8) == 0;
    options.model_len = (switches & 16) != 0 ? 24 : 60;
    options.headroom = (switches & 32) != 0 ? 3 : 4096;
    options.parents = bytes.draw(2, 30);
    options.children = bytes.draw(1, 3);
    options.granularity = bytes.draw(1, 4);
    options.page = options.granularity * bytes.draw(1, 3);
    options.seqs = bytes.draw(1, 6);
    options.budget = bytes.draw(1, 20);
    options.overtakes = bytes.draw(0, 3);
    options.host_parents = (kinds & 1) != 0 ? bytes.draw(1, 16) : 0;
    options.storage = (kinds & 2) != 0;
    options.storage_timeout = 4;
    options.window = (kinds & 4) != 0 ? bytes.draw(2, 9) : 0;
    options.checkpoint = (kinds & 8) != 0 ? options.page * bytes.draw(1, 2) : 0;
    options.full = (kinds & 16) == 0;
    options.window_children = 1 + (kinds >> 5 & 1);
    options.state_children = 1 + (kinds >> 6 & 1);
    options.role = (switches & 192) == 64    ? fsm::Role::Prefill
                   : (switches & 192) == 128 ? fsm::Role::Decode
                                             : fsm::Role::Fused;
    return options;
}

void submit(Engine& plane, Bytes& bytes, const std::vector<std::int32_t>& shared) {
    int handle = 1;
    while (handle <= kHandles && !plane.reusable(handle)) ++handle;
    if (handle > kHandles) return;
    const int length = bytes.draw(1, 20), common = bytes.draw(0, length), choice = bytes.next();
    std::vector<std::int32_t> tokens(shared.begin(), shared.begin() + common);
    while (static_cast<int>(tokens.size()) < length) tokens.push_back(bytes.next());
    const SubmitOptions options{.max_new_tokens = 1 + choice % 12,
                                .declared = (choice & 16) != 0,
                                .priority = (choice >> 5) % 3,
                                .name_space = choice > 240 ? "other" : "",
                                .max_cached_prefix_tokens = choice % 13 == 12 ? common / 2 : -1};
    try {
        plane.submit(handle, tokens, options);
    } catch (const RequestRefused&) {
        const bool declared = options.declared && plane.scheduler.config().role != fsm::Role::Prefill;
        CHECK(length + (declared ? options.max_new_tokens : 1) > plane.scheduler.max_single_request_tokens());
    }
}

// Calls that must be refused and change nothing; the invariants say the rest.
void malformed(Engine& plane, int which) {
    const std::vector<std::int32_t> tokens{1, which % 2 == 0 ? -1 : 2};
    // One that the scheduler ended by itself is known here until the next plan says so.
    if (!plane.live.empty() && plane.state(plane.live.begin()->first) != "gone") {
        CHECK_THROWS(std::invalid_argument, "alive", plane.scheduler.submit(plane.live.begin()->first, tokens, {.max_new_tokens = 1}));
    }
    if (which % 2 == 0) {
        CHECK_THROWS(std::invalid_argument, "negative", plane.scheduler.submit(kHandles + 1, tokens, {.max_new_tokens = 1}));
    } else {
        CHECK_THROWS(std::invalid_argument, "max_new_tokens", plane.scheduler.submit(kHandles + 1, tokens, {}));
    }
    CHECK_THROWS(std::invalid_argument, "empty", plane.scheduler.submit(kHandles + 1, {}, {.max_new_tokens = 1}));
    if (plane.results_out() > 0) {
        const ForwardResult wrong{plane.oldest_out().forward_id, {}, {}};
        CHECK_THROWS(std::invalid_argument, "tokens for a plan", plane.scheduler.advance({Finish{1}, wrong}));
    }
    const auto operations = plane.operations_out();
    if (!operations.empty()) {
        const OperationDone wrong{operations.back()->op_id, std::vector<std::uint8_t>(operations.back()->size() + 1, 1)};
        CHECK_THROWS(std::invalid_argument, "entries in succeeded", plane.scheduler.advance({Finish{1}, wrong}));
    }
    plane.scheduler.check_invariants();
}

void look(const Engine& plane) {
    for (int handle = 1; handle <= kHandles + 1; ++handle) {
        const Explanation why = plane.scheduler.explain(handle);
        CHECK(!why.code.empty() && (why.code == "running" || !why.text.empty()));
    }
    CHECK(plane.scheduler.decisions(8).size() <= 8);
}

// One event, of what is possible now. Rounds and results come often, so that streams get somewhere.
void one_event(Engine& plane, Bytes& bytes, int overlap, std::int64_t& now, const std::vector<std::int32_t>& shared) {
    const int what = bytes.next();
    const std::string possible = dealer::possible(plane, overlap);
    if (what < 64) {
        // Plan, or else let the oldest result land.
        dealer::deal(plane, possible.empty() ? dealer::dealt(Deal::Plan) : possible[0]);
    } else if (what < 104) {
        if (plane.results_out() > 0) dealer::deal(plane, dealer::dealt(Deal::Land));
    } else if (what < 136) {
        if (!plane.operations_out().empty()) plane.acknowledge(plane.operations_out().front()->op_id);
        if (plane.bootstraps_out() > 0) plane.bootstrap_next();
    } else if (what < 186) {
        submit(plane, bytes, shared);
    } else if (what < 226) {
        if (!possible.empty()) dealer::deal(plane, possible[static_cast<std::size_t>(bytes.next()) % possible.size()]);
    } else if (what < 238) {
        plane.end(bytes.draw(1, kHandles + 1), what % 2 == 0);
    } else if (what < 246) {
        plane.tick(now += bytes.next() % 8);
    } else if (what < 252) {
        malformed(plane, what);
    } else {
        look(plane);
    }
}

// For whoever looks into a failing input: TOKENSPEED_FUZZ_TRACE=1 prints what there is after every event.
void trace(const Engine& plane, const char* after, const Plan* plan = nullptr) {
    static const bool on = std::getenv("TOKENSPEED_FUZZ_TRACE") != nullptr;
    if (!on) return;
    const Snapshot snapshot = plane.scheduler.snapshot();
    std::fprintf(stderr, "%s (round %ld): %zu results and %zu operations out", after, static_cast<long>(snapshot.round),
                 plane.results_out(), plane.operations_out().size());
    for (const GroupCounts& group : snapshot.groups) {
        std::fprintf(stderr, "; %s: %ld held, %ld cached, %ld free", group.group_id.c_str(), static_cast<long>(group.held),
                     static_cast<long>(group.cached), static_cast<long>(group.free));
    }
    std::fprintf(stderr, "\n");
    for (const RequestRow& row : plane.scheduler.requests(99)) {
        std::fprintf(stderr, "    %d %s: prompt %d, computed %d, generated %d, blocks %ld; %s\n", row.handle,
                     std::string(fsm::name_of(row.state)).c_str(), row.prompt_tokens, row.computed_tokens,
                     row.generated_tokens, static_cast<long>(row.blocks), row.reason.c_str());
    }
    for (std::size_t i = 0; plan != nullptr && i < plan->handle.size(); ++i) {
        std::fprintf(stderr, "    planned %d: %d tokens from %d\n", plan->handle[i], plan->input_len[i], plan->prefix_len[i]);
    }
}

void play(Bytes bytes) {
    const engine::ConfigOptions options = options_from(bytes);
    try {
        engine::config(options).validate();
    } catch (const std::invalid_argument&) {
        return;
    }
    Engine plane(options);
    const std::vector<std::int32_t> shared = engine::prompt(24);
    std::int64_t now = 0;
    for (int events = 0; events < kMostEvents && !bytes.empty(); ++events) {
        one_event(plane, bytes, options.overlap, now, shared);
        trace(plane, "event");
    }
    look(plane);
    plane.drain([&](const Plan& plan) { trace(plane, "drain", &plan); });
    plane.check_pool_whole();
    CHECK(plane.live.empty());
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    try {
        play({data, size});
    } catch (const std::exception& error) {
        std::fprintf(stderr, "FAILED: %s\n", error.what());
        std::abort();
    }
    return 0;
}

#ifndef TOKENSPEED_LIBFUZZER
namespace {

void play_file(const std::filesystem::path& file) {
    std::ifstream stream(file, std::ios::binary);
    const std::vector<char> content((std::istreambuf_iterator<char>(stream)), std::istreambuf_iterator<char>());
    std::fprintf(stderr, "%s\n", file.c_str());
    LLVMFuzzerTestOneInput(reinterpret_cast<const std::uint8_t*>(content.data()), content.size());
}

void play_random(unsigned seed) {
    std::mt19937 random(seed);
    std::vector<std::uint8_t> bytes(100 + random() % 500);
    for (std::uint8_t& byte : bytes) byte = static_cast<std::uint8_t>(random());
    std::fprintf(stderr, "random %u\n", seed);
    LLVMFuzzerTestOneInput(bytes.data(), bytes.size());
}

}  // namespace

int main(int argc, char** argv) {
    std::size_t played = 0;
    for (int i = 1; i < argc; ++i) {
        if (std::string_view(argv[i]) == "--random" && i + 1 < argc) {
            const auto count = static_cast<unsigned>(std::atoi(argv[++i]));
            for (unsigned seed = 0; seed < count; ++seed, ++played) play_random(seed);
        } else if (std::filesystem::is_directory(argv[i])) {
            for (const auto& entry : std::filesystem::directory_iterator(argv[i])) {
                play_file(entry.path());
                ++played;
            }
        } else {
            play_file(argv[i]);
            ++played;
        }
    }
    std::printf("%zu inputs played\n", played);
    return played > 0 ? 0 : 1;
}
#endif
