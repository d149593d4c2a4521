"""Ops by what can make two calls with equal inputs differ, by name: nothing here imports torch.

Names are those of `torch.ops.aten` without overload. Which ops draw is what torch tags as
`nondeterministic_seeded` (https://docs.pytorch.org/docs/stable/torch.compiler_ir.html).
"""

from __future__ import annotations

import re


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


DROPPING = _names(
    "dropout dropout_ feature_dropout feature_dropout_ alpha_dropout alpha_dropout_"
    " feature_alpha_dropout feature_alpha_dropout_ native_dropout _fused_dropout"
    " _cudnn_init_dropout_state _fill_mem_eff_dropout_mask_ rrelu rrelu_ rrelu_with_noise"
    " rrelu_with_noise_ rrelu_with_noise_functional"
)
"""Ops that drop, or vary a slope: what `dropout: zero` turns off."""

MASKING = frozenset({"bernoulli", "bernoulli_"})
"""Ops that draw masks: the CPU's dropout is made of one and a product."""

DRAWING = _names(
    "_sample_dirichlet _standard_gamma bernoulli bernoulli_ binomial cauchy cauchy_ exponential"
    " exponential_ geometric geometric_ log_normal log_normal_ multinomial normal normal_"
    " normal_functional poisson rand rand_like randint randint_like randn randn_like random"
    " random_ randperm uniform uniform_ philox_rand"
)
"""Ops whose result is random numbers."""

DROPPING_INSIDE = _names(
    "_cudnn_attention_backward _cudnn_attention_forward _cudnn_rnn _efficient_attention_forward"
    " _flash_attention_forward _flash_attention_forward_no_dropout_inplace _fused_sdp_choice"
    " _lstm_mps _nested_tensor_softmax_with_shape _scaled_dot_product_attention_math"
    " _scaled_dot_product_attention_math_for_mps _scaled_dot_product_cudnn_attention"
    " _scaled_dot_product_cudnn_attention_backward _scaled_dot_product_efficient_attention"
    " _scaled_dot_product_efficient_attention_backward _scaled_dot_product_flash_attention"
    " _scaled_dot_product_flash_attention_for_cpu"
    " _scaled_dot_product_fused_attention_overrideable _triton_scaled_dot_attention"
    " scaled_dot_product_attention gru lstm miopen_rnn rnn_relu rnn_tanh"
)
"""Larger kernels that drop only if they are given a probability."""

FIXED_BY_THE_FLAG = _names(
    "index_add index_add_ index_copy index_copy_ index_put index_put_ _index_put_impl_"
    " _unsafe_index_put repeat_interleave"
)
"""Ops that write in the order of their threads unless torch's deterministic flag is on.

https://docs.pytorch.org/docs/stable/generated/torch.use_deterministic_algorithms.html
"""

MATMUL = re.compile(
    r"_?(mm|addmm|addmm_activation|bmm|baddbmm|addbmm|mv|addmv|addr|dot|vdot|matmul|linear|einsum"
    r"|scaled_mm|int_mm|addmm_relu|mkl_linear|tensordot|linear_pointwise|linalg_\w+)_?"
)
CONVOLUTION = re.compile(r"\w*conv\w*")
RECURRENT = re.compile(r"\w*(rnn|lstm|gru)\w*")
ATTENTION = re.compile(r"\w*(attention|sdp)\w*")
REDUCTION = re.compile(
    r"(nan)?(sum|mean)(_to_size)?|prod|var|std|var_mean|std_mean|norm|dist|trace|logsumexp|cumsum_?"
    r"|cumprod_?|_?foreach_norm|linalg_vector_norm|\w*softmax\w*|\w*(layer|batch|group|rms)_norm\w*"
    r"|\w*_loss\w*|\w*avg_pool\w*|\w*upsample\w*|\w*cdist\w*|_embedding_bag\w*"
)
SUMMING = re.compile(
    "|".join(
        f"(?:{family.pattern})" for family in (MATMUL, CONVOLUTION, RECURRENT, ATTENTION, REDUCTION)
    )
)
"""Ops whose result depends on the order in which they add."""

OVERWRITING = _names("copy_ fill_ zero_ set_ resize_")
"""Ops that may be given memory that nothing has written, because they do not read it."""
