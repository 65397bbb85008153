// A kernel has a bug planted behind `#ifdef BUG`, and is right without it.
// tests/toolchain/test_hostexec.py demands that each bug is found, and found where "planted" stands in the
// source.
#pragma once
struct Params {
    const int* in;
    int* out;
    int n;
};
constexpr int kThreads = 64;
