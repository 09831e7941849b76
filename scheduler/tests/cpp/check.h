// As much of a test framework as these tests need: TEST(name) { CHECK(...); } and a main() that runs them all.
#pragma once

#include <exception>
#include <iostream>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace check {

class Failure : public std::runtime_error {
public:
    using std::runtime_error::runtime_error;
};

struct Test {
    const char* name;
    void (*run)();
};

inline std::vector<Test>& tests() {
    static std::vector<Test> all;
    return all;
}

struct Registration {
    Registration(const char* name, void (*run)()) { tests().push_back({name, run}); }
};

[[noreturn]] inline void fail(const char* file, int line, const std::string& what) {
    throw Failure(std::string(file) + ":" + std::to_string(line) + ": " + what);
}

template <typename Left, typename Right>
void equal(const char* file, int line, const char* text, const Left& left, const Right& right) {
    if (left == right) return;
    std::ostringstream message;
    message << text << ": " << left << " is not " << right;
    fail(file, line, message.str());
}

template <typename Error, typename Body>
void throws(const char* file, int line, const char* text, const std::string& part, Body&& body) {
    try {
        body();
    } catch (const Error& error) {
        if (std::string(error.what()).find(part) != std::string::npos) return;
        fail(file, line, std::string(text) + " threw \"" + error.what() + "\" without \"" + part + "\"");
    }
    fail(file, line, std::string(text) + " did not throw");
}

inline int run_all() {
    int failed = 0;
    for (const Test& test : tests()) {
        try {
            test.run();
        } catch (const std::exception& error) {
            ++failed;
            std::cerr << "FAILED " << test.name << "\n  " << error.what() << "\n";
        }
    }
    std::cout << tests().size() - static_cast<std::size_t>(failed) << " of " << tests().size() << " passed\n";
    // A file without a test, or whose tests were not registered, must not look like success.
    return failed > 0 || tests().empty() ? 1 : 0;
}

}  // namespace check

#define TEST(name)                                                      \
    static void test_##name();                                          \
    static const check::Registration registration_##name{#name, test_##name}; \
    static void test_##name()
#define CHECK(condition) \
    do {                 \
        if (!(condition)) check::fail(__FILE__, __LINE__, #condition); \
    } while (false)
#define CHECK_EQ(left, right) check::equal(__FILE__, __LINE__, #left " == " #right, left, right)
#define CHECK_THROWS(Error, part, expression) \
    check::throws<Error>(__FILE__, __LINE__, #expression, part, [&] { (void)(expression); })

#ifndef CHECK_HAS_OWN_MAIN
int main() { return check::run_all(); }
#endif
