// Stand-ins for a few of CANN's kernels, computed element by element on host memory, so that a
// small network can be trained. An op whose kernel is not here fails and says which one it wanted.
//
// A kernel of CANN is two functions: ...GetWorkspaceSize takes the operands and returns an
// executor, and the function without that ending runs it.
#include "record.h"

#include <acl/acl.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <vector>

using Number = long double;  // holds every 64-bit integer, every double and what is smaller
using Sizes = std::vector<int64_t>;

struct aclTensor {
    aclDataType type;
    char *data;
    Sizes sizes, strides;
};
struct aclScalar {
    Number value;
};
struct aclIntArray {
    Sizes values;
};
struct aclTensorList {
    std::vector<const aclTensor *> tensors;
};
struct aclOpExecutor {
    std::function<void()> run;
};

namespace {

// One entry of this table per type that the kernels know.
#define EVERY_TYPE(ROW)                                                                            \
    ROW(ACL_FLOAT, float)                                                                          \
    ROW(ACL_DOUBLE, double)                                                                        \
    ROW(ACL_INT64, int64_t)                                                                        \
    ROW(ACL_INT32, int32_t)                                                                        \
    ROW(ACL_INT16, int16_t)                                                                        \
    ROW(ACL_INT8, int8_t)                                                                          \
    ROW(ACL_UINT8, uint8_t)                                                                        \
    ROW(ACL_BOOL, bool)

size_t width(aclDataType type) {
    switch (type) {
#define WIDTH(name, cpp) case name: return sizeof(cpp);
        EVERY_TYPE(WIDTH)
        default: record("UNKNOWN_TYPE", type); return 1;
    }
}

Number load(aclDataType type, const void *place) {
    switch (type) {
#define LOAD(name, cpp) case name: return *static_cast<const cpp *>(place);
        EVERY_TYPE(LOAD)
        default: return std::numeric_limits<Number>::quiet_NaN();
    }
}

void store(aclDataType type, void *place, Number value) {
    switch (type) {
#define STORE(name, cpp) case name: *static_cast<cpp *>(place) = static_cast<cpp>(value); return;
        EVERY_TYPE(STORE)
        default: return;
    }
}

// Where the element at `index` lies, broadcasting dimensions of size 1 and those that are missing.
char *place(const aclTensor &tensor, const Sizes &index) {
    const size_t extra = index.size() - tensor.sizes.size();
    int64_t offset = 0;
    for (size_t d = 0; d < tensor.sizes.size(); d++)
        offset += tensor.sizes[d] == 1 ? 0 : index[d + extra] * tensor.strides[d];
    return tensor.data + offset * static_cast<int64_t>(width(tensor.type));
}

Number get(const aclTensor &tensor, const Sizes &index) {
    return load(tensor.type, place(tensor, index));
}

void set(const aclTensor &tensor, const Sizes &index, Number value) {
    store(tensor.type, place(tensor, index), value);
}

void for_each_index(const Sizes &sizes, const std::function<void(const Sizes &)> &visit) {
    int64_t left = 1;
    for (int64_t size : sizes) left *= size;
    Sizes index(sizes.size(), 0);
    for (; left > 0; left--) {
        visit(index);
        for (size_t d = sizes.size(); d-- > 0 && ++index[d] == sizes[d];) index[d] = 0;
    }
}

template <typename Function, typename... Tensors>
std::function<void()> map(const aclTensor *out, Function function, const Tensors *...inputs) {
    return [=, out = *out, copies = std::tuple(*inputs...)] {
        for_each_index(out.sizes, [&](const Sizes &index) {
            std::apply([&](const auto &...in) { set(out, index, function(get(in, index)...)); },
                       copies);
        });
    };
}

// Fill `out`, in order, with numbers that depend on the seed and the offset alone.
template <typename Distribution>
std::function<void()> draw(const char *name, const aclTensor *out, uint64_t seed, uint64_t offset,
                           Distribution distribution) {
    return [=, out = *out]() mutable {
        record(name, seed, offset);
        std::seed_seq start{seed, seed >> 32, offset, offset >> 32};
        std::mt19937_64 engine(start);
        for_each_index(out.sizes,
                       [&](const Sizes &index) { set(out, index, distribution(engine)); });
    };
}

std::function<void()> product(const char *name, int cube_math_type, const aclTensor *a,
                              const aclTensor *b, const aclTensor *out,
                              std::function<Number(const Sizes &, Number)> finish) {
    return [=, a = *a, b = *b, out = *out] {
        record(name, cube_math_type);
        for_each_index(out.sizes, [&](const Sizes &index) {
            Number sum = 0;
            for (int64_t k = 0; k < a.sizes.back(); k++) {
                Sizes row(index), column(index);
                row.back() = column[index.size() - 2] = k;
                sum += get(a, row) * get(b, column);
            }
            set(out, index, finish(index, sum));
        });
    };
}

std::function<void()> reduce(const aclTensor *in, const aclIntArray *dims, const aclTensor *out,
                             bool mean) {
    std::vector<bool> gone(in->sizes.size(), dims->values.empty());
    for (int64_t d : dims->values) gone[d < 0 ? d + in->sizes.size() : d] = true;
    return [=, in = *in, out = *out] {
        Sizes kept, counted;
        for (size_t d = 0; d < gone.size(); d++) (gone[d] ? counted : kept).push_back(in.sizes[d]);
        for_each_index(kept, [&](const Sizes &outer) {
            Number sum = 0, count = 0;
            for_each_index(counted, [&](const Sizes &inner) {
                Sizes index;
                size_t o = 0, i = 0;
                for (bool reduced : gone) index.push_back(reduced ? inner[i++] : outer[o++]);
                sum += get(in, index);
                count++;
            });
            Sizes where(out.sizes.size(), 0);
            for (size_t d = 0, o = 0; d < where.size(); d++)
                if (out.sizes.size() == kept.size() || !gone[d]) where[d] = outer[o++];
            set(out, where, mean ? sum / count : sum);
        });
    };
}

// One group, nothing transposed, as many spatial dimensions as the input has.
std::function<void()> convolution(int cube_math_type, const aclTensor *in, const aclTensor *weight,
                                  const aclTensor *bias, const aclIntArray *strides,
                                  const aclIntArray *paddings, const aclIntArray *dilations,
                                  const aclTensor *out) {
    return [=, in = *in, weight = *weight, out = *out, bias = bias ? *bias : aclTensor{},
            stride = strides->values, padding = paddings->values, dilation = dilations->values] {
        record("aclnnConvolution.cube_math_type", cube_math_type);
        Sizes window(weight.sizes.begin() + 1, weight.sizes.end());
        for_each_index(out.sizes, [&](const Sizes &index) {
            Number sum = bias.data ? get(bias, {index[1]}) : 0;
            for_each_index(window, [&](const Sizes &offset) {
                Sizes from{index[0], offset[0]}, tap{index[1]};
                tap.insert(tap.end(), offset.begin(), offset.end());
                bool inside = true;
                for (size_t d = 0; d + 2 < index.size(); d++) {
                    from.push_back(index[d + 2] * stride[d] - padding[d] +
                                   offset[d + 1] * dilation[d]);
                    inside &= from.back() >= 0 && from.back() < in.sizes[d + 2];
                }
                if (inside) sum += get(in, from) * get(weight, tap);
            });
            set(out, index, sum);
        });
    };
}

constexpr auto identity = [](const Sizes &, Number sum) { return sum; };

}  // namespace

// A kernel: its name, its operands, and what running it does.
#define KERNEL(name, operands, ...)                                                                \
    aclError name##GetWorkspaceSize operands {                                                     \
        *executor = new aclOpExecutor{__VA_ARGS__};                                                \
        *workspace = 0;                                                                            \
        return ACL_SUCCESS;                                                                        \
    }                                                                                              \
    aclError name(void *, uint64_t, aclOpExecutor *executor, aclrtStream) {                        \
        record(#name);                                                                             \
        executor->run();                                                                           \
        delete executor;                                                                           \
        return ACL_SUCCESS;                                                                        \
    }
#define RESULT uint64_t *workspace, aclOpExecutor **executor
#define T const aclTensor *
#define S const aclScalar *
#define LIST const aclIntArray *

extern "C" {

aclTensor *aclCreateTensor(const int64_t *sizes, uint64_t rank, aclDataType type,
                           const int64_t *strides, int64_t offset, aclFormat, const int64_t *,
                           uint64_t, void *data) {
    char *start = static_cast<char *>(data) + offset * static_cast<int64_t>(width(type));
    return new aclTensor{type, start, Sizes(sizes, sizes + rank), Sizes(strides, strides + rank)};
}
aclScalar *aclCreateScalar(void *value, aclDataType type) {
    return new aclScalar{load(type, value)};
}
aclIntArray *aclCreateIntArray(const int64_t *values, uint64_t size) {
    return new aclIntArray{Sizes(values, values + size)};
}
aclTensorList *aclCreateTensorList(const aclTensor *const *tensors, uint64_t size) {
    return new aclTensorList{{tensors, tensors + size}};
}
aclError aclDestroyTensor(T tensor) { return delete tensor, ACL_SUCCESS; }
aclError aclDestroyScalar(S scalar) { return delete scalar, ACL_SUCCESS; }
aclError aclDestroyIntArray(const aclIntArray *array) { return delete array, ACL_SUCCESS; }
aclError aclDestroyTensorList(const aclTensorList *list) {
    for (T tensor : list->tensors) delete tensor;
    return delete list, ACL_SUCCESS;
}

// Filling and copying.
KERNEL(aclnnInplaceCopy, (T self, T from, RESULT), map(self, [](Number x) { return x; }, from))
KERNEL(aclnnCast, (T from, int, T out, RESULT), map(out, [](Number x) { return x; }, from))
KERNEL(aclnnInplaceZero, (T self, RESULT), map(self, [] { return 0; }))
KERNEL(aclnnInplaceOne, (T self, RESULT), map(self, [] { return 1; }))
KERNEL(aclnnInplaceFillScalar, (T self, S value, RESULT),
       map(self, [v = value->value] { return v; }))

// Arithmetic.
#define BINARY(name, formula)                                                                      \
    KERNEL(name, (T a, T b, T out, RESULT),                                                        \
           map(out, [](Number x, Number y) { return formula; }, a, b))
#define WITH_SCALAR(name, formula)                                                                 \
    KERNEL(name, (T a, S b, T out, RESULT),                                                        \
           map(out, [y = b->value](Number x) { return formula; }, a))
#define INPLACE(name, formula)                                                                     \
    KERNEL(name, (T a, T b, RESULT), map(a, [](Number x, Number y) { return formula; }, a, b))
#define INPLACE_WITH_SCALAR(name, formula)                                                         \
    KERNEL(name, (T a, S b, RESULT), map(a, [y = b->value](Number x) { return formula; }, a))
#define SCALED(name, formula)                                                                      \
    KERNEL(name, (T a, T b, S alpha, T out, RESULT),                                               \
           map(out, [s = alpha->value](Number x, Number y) { return formula; }, a, b))
#define INPLACE_SCALED(name, formula)                                                              \
    KERNEL(name, (T a, T b, S alpha, RESULT),                                                      \
           map(a, [s = alpha->value](Number x, Number y) { return formula; }, a, b))
#define SCALED_SCALAR(name, formula)                                                               \
    KERNEL(name, (T a, S b, S alpha, T out, RESULT),                                               \
           map(out, [y = b->value, s = alpha->value](Number x) { return formula; }, a))
#define INPLACE_SCALED_SCALAR(name, formula)                                                       \
    KERNEL(name, (T a, S b, S alpha, RESULT),                                                      \
           map(a, [y = b->value, s = alpha->value](Number x) { return formula; }, a))
BINARY(aclnnMul, x * y)
BINARY(aclnnDiv, x / y)
BINARY(aclnnEqTensor, x == y)
BINARY(aclnnNeTensor, x != y)
WITH_SCALAR(aclnnMuls, x * y)
WITH_SCALAR(aclnnDivs, x / y)
WITH_SCALAR(aclnnEqScalar, x == y)
WITH_SCALAR(aclnnNeScalar, x != y)
INPLACE(aclnnInplaceMul, x * y)
INPLACE_WITH_SCALAR(aclnnInplaceMuls, x * y)
SCALED(aclnnAdd, x + s * y)
SCALED(aclnnSub, x - s * y)
INPLACE_SCALED(aclnnInplaceAdd, x + s * y)
INPLACE_SCALED(aclnnInplaceSub, x - s * y)
SCALED_SCALAR(aclnnAdds, x + s * y)
SCALED_SCALAR(aclnnSubs, x - s * y)
INPLACE_SCALED_SCALAR(aclnnInplaceAdds, x + s * y)
INPLACE_SCALED_SCALAR(aclnnInplaceSubs, x - s * y)
KERNEL(aclnnRelu, (T in, T out, RESULT), map(out, [](Number x) { return x > 0 ? x : 0; }, in))
KERNEL(aclnnThresholdBackward, (T grad, T in, S threshold, T out, RESULT),
       map(out, [t = threshold->value](Number g, Number x) { return x > t ? g : 0; }, grad, in))

// Products and sums.
KERNEL(aclnnMm, (T a, T b, T out, int8_t cube_math_type, RESULT),
       product("aclnnMm.cube_math_type", cube_math_type, a, b, out, identity))
KERNEL(aclnnMatmul, (T a, T b, T out, int8_t cube_math_type, RESULT),
       product("aclnnMatmul.cube_math_type", cube_math_type, a, b, out, identity))
KERNEL(aclnnAddmm, (T c, T a, T b, S beta, S alpha, T out, int8_t cube_math_type, RESULT),
       product("aclnnAddmm.cube_math_type", cube_math_type, a, b, out,
               [c = *c, beta = beta->value, alpha = alpha->value](const Sizes &index, Number sum) {
                   return alpha * sum + beta * get(c, index);
               }))
KERNEL(aclnnConvolution,
       (T in, T weight, T bias, LIST stride, LIST padding, LIST dilation, bool, LIST, int64_t,
        T out, int8_t cube_math_type, RESULT),
       convolution(cube_math_type, in, weight, bias, stride, padding, dilation, out))
KERNEL(aclnnReduceSum, (T in, LIST dims, bool, int, T out, RESULT),
       reduce(in, dims, out, false))
KERNEL(aclnnMean, (T in, LIST dims, bool, int, T out, RESULT),
       reduce(in, dims, out, true))
KERNEL(aclnnMseLoss, (T in, T target, int64_t reduction, T out, RESULT),
       [in = *in, target = *target, out = *out, mean = reduction == 1] {
           Number sum = 0, count = 0;
           for_each_index(in.sizes, [&](const Sizes &index) {
               sum += std::pow(get(in, index) - get(target, index), 2);
               count++;
           });
           set(out, Sizes(out.sizes.size(), 0), mean ? sum / count : sum);
       })
KERNEL(aclnnMseLossBackward, (T grad, T in, T target, int64_t reduction, T out, RESULT),
       [grad = *grad, in = *in, target = *target, out = *out, mean = reduction == 1] {
           Number count = 1;
           for (int64_t size : in.sizes) count *= mean ? size : 1;
           for_each_index(out.sizes, [&](const Sizes &index) {
               const Number difference = get(in, index) - get(target, index);
               set(out, index, 2 * difference * get(grad, index) / count);
           });
       })

// Random numbers.
KERNEL(aclnnInplaceNormal,
       (T self, float mean, float deviation, int64_t seed, int64_t offset, RESULT),
       draw("aclnnInplaceNormal.seed", self, seed, offset,
            std::normal_distribution<double>(mean, deviation)))
KERNEL(aclnnInplaceUniform,
       (T self, double from, double to, uint64_t seed, uint64_t offset, RESULT),
       draw("aclnnInplaceUniform.seed", self, seed, offset,
            std::uniform_real_distribution<double>(from, to)))
KERNEL(aclnnDropoutGenMaskV2,
       (LIST shape, double p, int64_t seed, int64_t offset, int, T mask, RESULT),
       draw("aclnnDropoutGenMaskV2.seed", mask, seed, offset, [p](std::mt19937_64 &engine) {
           int byte = 0;
           for (int bit = 0; bit < 8; bit++)
               byte |= std::bernoulli_distribution(1 - p)(engine) << bit;
           return byte;
       }))
KERNEL(aclnnDropoutDoMask, (T in, T mask, double p, T out, RESULT),
       [in = *in, bits = mask->data, p, out = *out] {
           int64_t k = 0;
           for_each_index(out.sizes, [&](const Sizes &index) {
               const bool kept = bits[k / 8] >> k % 8 & 1;
               set(out, index, kept ? get(in, index) / (1 - p) : 0);
               k++;
           });
       })

}  // extern "C"
