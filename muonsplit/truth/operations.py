"""Which torch operations move rows, keep them, or mix them; by the name torch gives them."""

MOVES = frozenset(
    {"view", "reshape", "transpose", "permute", "split", "split_with_sizes", "chunk", "unflatten"}
    | {"flatten", "squeeze", "unsqueeze", "narrow", "expand", "repeat", "repeat_interleave"}
    | {"movedim", "moveaxis", "swapaxes", "swapdims", "unbind", "roll", "flip", "t", "T", "mT"}
    | {
        "tile",
        "broadcast_to",
        "tensor_split",
        "unfold",
        "diagonal",
        "select",
        "ravel",
        "__getitem__",
    }
    | {"adjoint", "transpose_", "squeeze_", "unsqueeze_", "rot90", "hsplit", "vsplit", "as_strided"}
    | {"pixel_shuffle", "pixel_unshuffle"}
)

# One input, one output of the same shape, row by row.
KEEPS = frozenset(
    {
        "contiguous",
        "clone",
        "detach",
        "to",
        "type",
        "type_as",
        "float",
        "half",
        "bfloat16",
        "double",
    }
    | {"cuda", "cpu", "requires_grad_", "dropout", "dropout_", "feature_dropout", "alpha_dropout"}
    | {"gelu", "relu", "relu_", "silu", "sigmoid", "sigmoid_", "tanh", "softplus", "elu", "mish"}
    | {"leaky_relu", "hardtanh", "relu6", "hardswish", "logsigmoid", "exp", "exp_", "log", "log1p"}
    | {"sqrt", "rsqrt", "reciprocal", "abs", "neg", "negative", "__neg__", "sign", "sin", "cos"}
    | {"pow", "pow_", "__pow__", "square", "clamp", "clamp_", "clamp_min", "clamp_max", "clip"}
    | {"nan_to_num", "nan_to_num_", "softmax", "log_softmax", "tril", "triu", "erf", "round"}
    | {"layer_norm", "rms_norm", "group_norm", "batch_norm", "normalize", "instance_norm", "expm1"}
    | {"masked_fill", "masked_fill_", "cumsum", "conj", "real", "imag", "floor", "dequantize"}
)

# Several inputs, broadcast against each other, row by row.
ELEMENTWISE = frozenset(
    {"add", "add_", "sub", "sub_", "subtract", "mul", "mul_", "multiply", "div", "div_", "divide"}
    | {"true_divide", "rsub", "maximum", "minimum", "where", "lerp", "addcmul", "addcdiv", "prelu"}
    | {"__add__", "__radd__", "__iadd__", "__sub__", "__rsub__", "__isub__", "__mul__", "__rmul__"}
    | {"__imul__", "__truediv__", "__rtruediv__", "__itruediv__", "__rpow__", "fmod", "logaddexp"}
    | {"remainder", "__div__", "__rdiv__", "__idiv__"}
)

MATRIX_PRODUCTS = frozenset({"matmul", "__matmul__", "__rmatmul__", "bmm", "mm", "mv"})
# (bias, left, right)
ADDED_PRODUCTS = frozenset({"addmm", "baddbmm", "addbmm", "addmm_", "baddbmm_"})

# What asks about a tensor and gives none of its rows.
ASKS = frozenset(
    {"shape", "size", "dim", "ndim", "numel", "stride", "dtype", "device", "is_meta", "__len__"}
    | {"requires_grad", "is_floating_point", "is_contiguous", "data_ptr", "layout", "grad_fn"}
    | {"zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "new_zeros"}
    | {"new_ones", "new_empty", "new_full", "new_tensor", "__hash__", "is_complex", "is_cuda"}
    | {"element_size", "get_device", "__format__", "__repr__", "is_sparse", "names", "nelement"}
    | {"__bool__", "item", "tolist", "__int__", "__float__", "__index__", "result_type"}
    | {"__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "eq", "ne", "lt", "le", "gt"}
    | {
        "ge",
        "isnan",
        "isinf",
        "isfinite",
        "argmax",
        "argmin",
        "argsort",
        "is_nested",
        "register_hook",
    }
    | {
        "grad",
        "is_inference",
        "is_leaf",
        "_version",
        "untyped_storage",
        "storage_offset",
        "itemsize",
    }
    | {
        "logical_not",
        "logical_and",
        "any",
        "all",
        "is_autocast_enabled",
        "__contains__",
        "is_quantized",
    }
)

# What makes a tensor of nothing; under a followed pass, on meta.
MAKES = frozenset(
    {"zeros", "ones", "empty", "full", "arange", "tensor", "as_tensor", "rand", "randn", "eye"}
    | {
        "linspace",
        "logspace",
        "randint",
        "randperm",
        "normal",
        "hann_window",
        "range",
        "scalar_tensor",
    }
    | {"tril_indices", "triu_indices", "fftfreq", "empty_strided", "hamming_window", "rfftfreq"}
)

# Statistics and selections: what is told of rows is none of them.
TOLD = frozenset(
    {"embedding", "topk", "max", "min", "var_mean", "std_mean", "sum", "mean", "var", "std", "norm"}
    | {"vector_norm", "amax", "amin", "logsumexp", "linalg_norm", "linalg_vector_norm", "sort"}
)
