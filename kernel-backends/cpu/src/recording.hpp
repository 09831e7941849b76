// Calls of kernels kept for later: a step whose shapes and addresses do not change is recorded once and replayed with one
// call, without the interpreter between its kernels.
#pragma once

#include <functional>
#include <vector>

namespace tokenspeed {

// Kernel calls in order, with their arguments: addresses that must still hold what they held, and sizes.
class Recording {
public:
    void add(std::function<void()> call) { calls_.push_back(std::move(call)); }
    // Runs them all, in order, on this thread (and the pool's, as each kernel would).
    void replay() const {
        for (const auto& call : calls_) call();
    }
    std::size_t size() const { return calls_.size(); }

private:
    std::vector<std::function<void()>> calls_;
};

// Where this thread's calls are noted besides being made; null: nowhere.
inline thread_local Recording* current_recording = nullptr;

// Makes the call, and notes it where this thread records. `call` holds its arguments by value.
template <class Call>
void make_call(const Call& call) {
    if (current_recording) current_recording->add(call);
    call();
}

}  // namespace tokenspeed
