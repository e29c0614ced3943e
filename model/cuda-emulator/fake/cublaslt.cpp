// A fake cuBLASLt on the fake driver: the products that Baton uses, in the manual's column-major terms. It rejects
// everything else, as the library does.
//
// There are eight algorithms. Which one it proposes first depends on the number of rows. They differ in speed, and the odd
// ones add the two halves of K separately, so their last bits differ too.
//
// Environment: FAKE_REFUSED_ROWS, numbers of rows for which there are no fp8 products. FAKE_OLD_CUBLASLT: 1 for a library
// before CUDA 12.8, which knows no modes of scales.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <map>
#include <sstream>
#include <string>
#include <vector>

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;

#define API extern "C" __attribute__((visibility("default")))

enum { SUCCESS = 0, NOT_INITIALIZED = 1, INVALID_VALUE = 7, EXECUTION_FAILED = 13, NOT_SUPPORTED = 15 };
enum { F32 = 0, BF16 = 14, E4M3 = 28, COMPUTE_32F = 68 };
// Modes of scales: one scale, one for each row, for each 128 numbers of a row, for each block of 128 x 128.
enum { SCALAR = 0, OUTER_VECTOR = 3, VECTORS_OF_128 = 4, BLOCKS_OF_128 = 5 };

struct Description {
    int transposes_a = 0, transposes_b = 0, mode_a = SCALAR, mode_b = SCALAR;
    u64 scales_a = 0, scales_b = 0;
};

struct Layout {
    int type;
    u64 rows, columns;
    int64_t stride;

    u64 element_bytes() const { return type == F32 ? 4 : type == BF16 ? 2 : 1; }
    u64 size_bytes() const { return ((columns - 1) * stride + rows) * element_bytes(); }
};

struct Preference {
    u64 workspace_bytes = 0;
    // Of sums of parts. All by default.
    u32 reductions = 0xffffffff;
    std::map<int, u32> alignments;
};

struct Algorithm {
    // The shape, then the number of the algorithm.
    u64 data[8];
};

constexpr u64 NUM_ALGORITHMS = 8;
// Milliseconds of a product.
constexpr double COSTS[NUM_ALGORITHMS] = {0.8, 0.7, 0.6, 0.1, 0.5, 0.05, 0.04, 0.9};
// One algorithm is refused when it runs, one is found with a bad state, and one does not serve a single row.
constexpr u64 REFUSED = 5, BAD = 6, OF_MANY_ROWS = 0;

struct Heuristic {
    Algorithm algorithm;
    size_t workspace_bytes;
    int state;
    float waves;
    int reserved[4];
};

static void* of_driver(const char* name) {
    static void* library = dlopen("libcuda.so.1", RTLD_NOW);
    void* found = library ? dlsym(library, name) : nullptr;
    if (!found) {
        fprintf(stderr, "fake cuBLASLt: this is not the fake driver\n");
        abort();
    }
    return found;
}

static bool is_old() { return getenv("FAKE_OLD_CUBLASLT") != nullptr; }

API size_t cublasLtGetVersion() { return is_old() ? 120601 : 120901; }
API size_t cublasLtGetCudartVersion() { return is_old() ? 12060 : 12090; }
API const char* cublasLtGetStatusName(int status) {
    switch (status) {
    case SUCCESS: return "CUBLAS_STATUS_SUCCESS";
    case NOT_INITIALIZED: return "CUBLAS_STATUS_NOT_INITIALIZED";
    case INVALID_VALUE: return "CUBLAS_STATUS_INVALID_VALUE";
    case NOT_SUPPORTED: return "CUBLAS_STATUS_NOT_SUPPORTED";
    default: return "CUBLAS_STATUS_INTERNAL_ERROR";
    }
}
API int cublasLtCreate(void** handle) {
    *handle = malloc(1);
    return SUCCESS;
}
API int cublasLtDestroy(void* handle) {
    free(handle);
    return SUCCESS;
}
API int cublasLtMatmulDescCreate(Description** description, int compute, int scale_type) {
    *description = new Description;
    return compute == COMPUTE_32F && scale_type == F32 ? SUCCESS : NOT_SUPPORTED;
}
API int cublasLtMatmulDescDestroy(Description* description) {
    delete description;
    return SUCCESS;
}
API int cublasLtMatmulDescSetAttribute(Description* description, int attribute, const void* value, size_t size) {
    auto set = [&](auto& to) -> int {
        if (size != sizeof to) return INVALID_VALUE;
        memcpy(&to, value, size);
        return SUCCESS;
    };
    if (is_old() && attribute > 30) return INVALID_VALUE;
    switch (attribute) {
    case 3: return set(description->transposes_a);
    case 4: return set(description->transposes_b);
    case 17: return set(description->scales_a);
    case 18: return set(description->scales_b);
    case 31: return set(description->mode_a);
    case 32: return set(description->mode_b);
    default: return INVALID_VALUE;
    }
}
API int cublasLtMatrixLayoutCreate(Layout** layout, int type, u64 rows, u64 columns, int64_t stride) {
    *layout = new Layout{type, rows, columns, stride};
    return stride >= int64_t(rows) ? SUCCESS : INVALID_VALUE;
}
API int cublasLtMatrixLayoutDestroy(Layout* layout) {
    delete layout;
    return SUCCESS;
}
API int cublasLtMatmulPreferenceCreate(Preference** preference) {
    *preference = new Preference;
    return SUCCESS;
}
API int cublasLtMatmulPreferenceDestroy(Preference* preference) {
    delete preference;
    return SUCCESS;
}
API int cublasLtMatmulPreferenceSetAttribute(Preference* preference, int attribute, const void* value, size_t size) {
    if (attribute == 3 && size == 4) return memcpy(&preference->reductions, value, 4), SUCCESS;
    if (attribute == 1 && size == 8) return memcpy(&preference->workspace_bytes, value, 8), SUCCESS;
    // Attributes of each matrix.
    bool is_alignment = attribute >= 5 && attribute <= 8 && size == 4;
    return is_alignment ? (memcpy(&preference->alignments[attribute], value, 4), SUCCESS) : INVALID_VALUE;
}

static bool is_refused(u64 num_rows) {
    const char* list = getenv("FAKE_REFUSED_ROWS");
    std::istringstream rows(list ? list : "");
    for (std::string number; std::getline(rows, number, ',');) {
        if (std::stoull(number) == num_rows) return true;
    }
    return false;
}

static int check(const Description* d, const Layout* a, const Layout* b, const Layout* c, const Layout* out) {
    if (d->transposes_a != 1 || d->transposes_b != 0) return NOT_SUPPORTED;
    if (a->rows != b->rows || out->rows != a->columns || out->columns != b->columns) return INVALID_VALUE;
    if (memcmp(c, out, sizeof *c) != 0) return INVALID_VALUE;
    u64 depth = a->rows;
    if (a->type == BF16 && b->type == BF16) {
        bool is_aligned = depth % 8 == 0 && a->stride % 8 == 0 && b->stride % 8 == 0;
        return (out->type == BF16 || out->type == F32) && is_aligned ? SUCCESS : NOT_SUPPORTED;
    }
    if (a->type != E4M3 || b->type != E4M3 || out->type != BF16) return NOT_SUPPORTED;
    if (depth % 16 || out->rows % 16 || a->stride % 16 || b->stride % 16) return NOT_SUPPORTED;
    if (is_refused(b->columns)) return NOT_SUPPORTED;
    if (d->mode_a == BLOCKS_OF_128 && d->mode_b == VECTORS_OF_128) {
        return depth % 128 == 0 && b->columns % 4 == 0 ? SUCCESS : NOT_SUPPORTED;
    }
    return d->mode_a == d->mode_b && (d->mode_a == SCALAR || d->mode_a == OUTER_VECTOR) ? SUCCESS : NOT_SUPPORTED;
}

// An algorithm is valid for one matrix and any number of rows.
static u64 mark_of(const Layout* a) { return u64(a->type) << 56 ^ a->rows << 28 ^ a->columns; }

API int cublasLtMatmulAlgoGetHeuristic(void* handle, const Description* description, const Layout* a, const Layout* b,
                                       const Layout* c, const Layout* out, const Preference* preference, int num_wanted,
                                       Heuristic* found, int* num_found) {
    *num_found = 0;
    if (!handle) return NOT_INITIALIZED;
    if (num_wanted < 1 || preference->alignments.size() != 4) return INVALID_VALUE;
    if (int status = check(description, a, b, c, out)) return status;
    std::vector<u64> numbers = {b->columns % 3};
    for (u64 number = 0; number < NUM_ALGORITHMS; ++number) {
        if (number != numbers[0]) numbers.push_back(number);
    }
    for (u64 number : numbers) {
        if (*num_found == num_wanted) break;
        if (preference->reductions == 0 && number % 2 == 1) continue;
        if (number == OF_MANY_ROWS && b->columns == 1) continue;
        int state = number == BAD ? NOT_SUPPORTED : SUCCESS;
        found[(*num_found)++] = {{{mark_of(a), number}}, preference->workspace_bytes, state, 1.0f, {}};
    }
    return SUCCESS;
}

API int cublasLtMatmulAlgoCheck(void* handle, const Description* description, const Layout* a, const Layout* b,
                                const Layout* c, const Layout* out, const Algorithm* algorithm, Heuristic* found) {
    if (!handle) return NOT_INITIALIZED;
    if (int status = check(description, a, b, c, out)) return status;
    u64 number = algorithm->data[1];
    if (algorithm->data[0] != mark_of(a) || number >= NUM_ALGORITHMS || number == BAD) return NOT_SUPPORTED;
    if (number == OF_MANY_ROWS && b->columns == 1) return NOT_SUPPORTED;
    *found = {*algorithm, 0, SUCCESS, 1.0f, {}};
    return SUCCESS;
}

static float element(const void* at, u64 idx, int type) {
    if (type == F32) return static_cast<const float*>(at)[idx];
    if (type == BF16) {
        u32 bits = u32(static_cast<const u16*>(at)[idx]) << 16;
        float x;
        memcpy(&x, &bits, 4);
        return x;
    }
    u8 code = static_cast<const u8*>(at)[idx];
    int exponent = code >> 3 & 15, mantissa = code & 7;
    if ((code & 0x7f) == 0x7f) return NAN;
    float size = exponent == 0 ? ldexpf(float(mantissa), -9) : ldexpf(float(8 + mantissa), exponent - 10);
    return code & 0x80 ? -size : size;
}

struct Product {
    Description description;
    Layout a, b, out;
    const void *from_a, *from_b;
    void* to;
    float alpha, beta;
    void* workspace;
    u64 algorithm;
};

// out = alpha a^T b + beta out.
static int multiply(void* at) {
    auto& p = *static_cast<Product*>(at);
    // Algorithms may use the workspace.
    memset(p.workspace, 0xff, 4096);
    reinterpret_cast<int (*)(double)>(of_driver("fake_spend"))(COSTS[p.algorithm]);
    u64 depth = p.a.rows, num_groups = (depth / 128 + 3) / 4 * 4;
    int mode = p.description.mode_a;
    auto* scales_a = reinterpret_cast<const float*>(p.description.scales_a);
    auto* scales_b = reinterpret_cast<const float*>(p.description.scales_b);
    std::vector<float> a(depth), b(p.b.columns * depth);
    for (u64 n = 0; n < p.b.columns; ++n)
        for (u64 k = 0; k < depth; ++k) b[n * depth + k] = element(p.from_b, n * p.b.stride + k, p.b.type);
    for (u64 m = 0; m < p.a.columns; ++m) {
        for (u64 k = 0; k < depth; ++k) a[k] = element(p.from_a, m * p.a.stride + k, p.a.type);
        for (u64 n = 0; n < p.b.columns; ++n) {
            float sum = 0.0f, part = 0.0f;
            for (u64 k = 0; k < depth; ++k) {
                if (mode != BLOCKS_OF_128 && p.algorithm % 2 == 1 && k == depth / 2) sum = part, part = 0.0f;
                part += a[k] * b[n * depth + k];
                if (mode == BLOCKS_OF_128 && k % 128 == 127) {
                    u64 group = k / 128;
                    sum += part * scales_a[m / 128 * num_groups + group] * scales_b[group * p.b.columns + n];
                    part = 0.0f;
                }
            }
            sum += part;
            if (mode == OUTER_VECTOR) sum *= scales_a[m] * scales_b[n];
            u64 idx = n * p.out.stride + m;
            sum = p.alpha * sum + (p.beta == 0.0f ? 0.0f : p.beta * element(p.to, idx, p.out.type));
            u32 bits;
            memcpy(&bits, &sum, 4);
            if (p.out.type == F32) {
                static_cast<float*>(p.to)[idx] = sum;
            } else {
                u32 rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
                static_cast<u16*>(p.to)[idx] = sum != sum ? 0x7fff : u16(rounded);
            }
        }
    }
    return 1;
}

API int cublasLtMatmul(void* handle, const Description* description, const float* alpha, const void* from_a, const Layout* a,
                       const void* from_b, const Layout* b, const float* beta, const void* c, const Layout* c_layout, void* to,
                       const Layout* out, const Algorithm* algorithm, void* workspace, size_t workspace_bytes, void* stream) {
    if (!handle) return NOT_INITIALIZED;
    if (int status = check(description, a, b, c_layout, out)) return status;
    u64 number = algorithm->data[1];
    if (c != to || algorithm->data[0] != mark_of(a) || number >= NUM_ALGORITHMS) return INVALID_VALUE;
    if (number == REFUSED || number == BAD) return NOT_SUPPORTED;
    if ((u64(from_a) | u64(from_b) | u64(to)) % 16 != 0) return INVALID_VALUE;
    bool has_scales = description->mode_a != SCALAR;
    if (has_scales != (description->scales_a != 0) || has_scales != (description->scales_b != 0)) return INVALID_VALUE;
    auto reaches = reinterpret_cast<int (*)(u64, u64)>(of_driver("fake_reaches"));
    if (!reaches(u64(from_a), a->size_bytes()) || !reaches(u64(from_b), b->size_bytes()) ||
        !reaches(u64(to), out->size_bytes()) || !reaches(u64(workspace), workspace_bytes)) {
        fprintf(stderr, "fake cuBLASLt: a product leaves the device's memory\n");
        abort();
    }
    // The graph keeps a copy and runs it again.
    auto* product = new Product{*description, *a, *b, *out, from_a, from_b, to, *alpha, *beta, workspace, number};
    auto ask = reinterpret_cast<int (*)(void*, int (*)(void*), void*)>(of_driver("fake_ask"));
    return ask(stream, multiply, product) == 0 ? SUCCESS : EXECUTION_FAILED;
}
