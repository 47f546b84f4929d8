"""Names of operations by what they cost and by what they do to the samples of a batch."""

from __future__ import annotations


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


PRODUCTS = words("matmul mm bmm mv dot linear einsum addmm")
CONVOLUTIONS = words("conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d")
RECURRENT = words("lstm gru rnn_tanh rnn_relu")
LOOKUPS = words("embedding embedding_bag _embedding_bag")
HEAVY = (
    PRODUCTS
    | CONVOLUTIONS
    | LOOKUPS
    | RECURRENT
    | words(
        """
        baddbmm addbmm bilinear addmv convolution _convolution scaled_dot_product_attention
        lstm_cell gru_cell
        """
    )
)
"""Products, convolutions and look-ups, which are operators of their own."""

CHEAP = words(
    """
    view reshape _unsafe_view transpose permute t numpy_T expand expand_as unsqueeze squeeze
    slice select split split_with_sizes chunk unbind unflatten flatten movedim narrow contiguous
    clone detach detach_ alias to _to_copy type_as float lift_fresh_copy add sub rsub neg mul
    div add_ sub_ mul_ div_ cat stack concat where masked_fill masked_fill_ dropout dropout_
    zeros_like ones_like full_like zeros ones full new_zeros new_ones new_full arange
    scalar_tensor copy_ broadcast_tensors view_as repeat getitem eq ne lt le gt ge __and__
    __or__ bitwise_and bitwise_or bitwise_not logical_and logical_or logical_not tril triu index
    gather cumsum any all argmax argmin sum mean pad constant_pad_nd abs minimum maximum min max
    clamp clamp_min log sqrt rsqrt pow square floor sign remainder floor_divide one_hot
    new_empty roll flip isnan isinf fill_ zero_ select_scatter slice_scatter linspace
    eye meshgrid reciprocal exp
    """
)
"""Operations that are cheap enough to be done again by every reader."""

NOT_A_REMAINDER = words("index gather cumsum pow sqrt rsqrt square exp log one_hot abs max min")
"""Cheap operations that are work all the same where a parameter is involved."""

LINEAR = words(
    """
    view reshape _unsafe_view flatten unflatten squeeze unsqueeze expand expand_as transpose permute
    t neg clone contiguous detach alias to _to_copy type_as float double lift_fresh_copy select
    slice sum mean view_as movedim nan_to_num
    """
)
"""Operations that may be done before or after a sum over samples."""

BY_CLASS = words("nll_loss nll_loss_nd nll_loss2d cross_entropy_loss")
"""Losses whose mean is over the targets that are not ignored, by their weights."""

BATCH_NORMS = words("batch_norm native_batch_norm cudnn_batch_norm miopen_batch_norm")
ALONG = words(
    """
    softmax log_softmax _softmax _log_softmax cumsum cumprod logcumsumexp cummax cummin sort argsort
    topk flip roll kthvalue
    """
)
SCATTERS = words("select_scatter slice_scatter diagonal_scatter")
"""Operations that put a value into a part of another one."""

LIKE = words("type_as expand_as view_as reshape_as")
"""Operations that take the type or the sizes of their second argument, and not its entries."""

FACTORIES = words("new_ones new_zeros new_full zeros_like ones_like full_like")
"""Operations that take the type, and the sizes, of their first argument, and not its entries."""

ALIKE = FACTORIES | words(
    "zeros ones full empty new_empty empty_like expand expand_as repeat tile repeat_interleave"
)
"""Operations that make any number of rows, all of them alike, unlike ``arange``, ``eye`` and a
slice of a table."""

COUNTS = words("histc bincount scatter_add index_add")
"""Sums over entries that other values sort into classes, such as the tokens of each expert."""

ARITHMETIC = PRODUCTS | words("mul div add sub rsub where addcmul")

KEEPS_ORDER = (
    CHEAP
    | HEAVY
    | ALONG
    | BATCH_NORMS
    | words(
        """
        layer_norm native_layer_norm rms_norm _fused_rms_norm group_norm native_group_norm
        instance_norm glu hardswish hardsigmoid relu6 logsigmoid std var amax amin logsumexp norm
        max_pool1d max_pool2d max_pool3d max_pool2d_with_indices avg_pool1d avg_pool2d avg_pool3d
        adaptive_avg_pool1d adaptive_avg_pool2d adaptive_max_pool2d linalg_vector_norm
        upsample_nearest1d upsample_nearest2d upsample_bilinear2d upsample_bicubic2d
        cosine_similarity
        """
    )
)
"""Operations that have an output for each index of a dimension in its order, unless they name it as
the one to reorder."""

AT_PLACES = words(
    "index_put_ index_add_ index_copy_ scatter_ scatter_add_ masked_fill_ masked_scatter_"
)
"""Writes that change nothing where their index, mask or source is empty."""

COPIES = words("alias detach clone to _to_copy contiguous")
SAME_ENTRIES = COPIES | words("view reshape flatten squeeze unsqueeze permute transpose")
OF_ZEROS = SAME_ENTRIES | words("sum any mul select slice expand item _local_scalar_dense")
"""Operations that turn zeros, or no entries, into zeros."""

FINITE = AT_PLACES | words(
    """
    index_put index_add index_copy scatter scatter_add masked_fill masked_scatter add add_ sub rsub
    neg clamp clamp_min maximum where cat stack exp sigmoid softmax tanh relu linear matmul
    zeros_like
    """
)
"""Further operations that are finite where there are no entries, and so are their derivatives."""
