"""Names of operations by what they do to the samples of a batch."""

from __future__ import annotations

from anabranch.graph.call_traits import words

LINEAR = words(
    """
    view reshape _unsafe_view flatten unflatten squeeze unsqueeze expand expand_as transpose permute
    t neg clone contiguous detach alias to _to_copy type_as float double lift_fresh_copy select
    slice sum mean view_as movedim nan_to_num
    """
)
"""Operations that may be done before or after a sum over samples."""

REDUCED = words(
    """
    mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy
    binary_cross_entropy_with_logits kl_div poisson_nll_loss soft_margin_loss hinge_embedding_loss
    cosine_embedding_loss margin_ranking_loss triplet_margin_loss multi_margin_loss
    multilabel_margin_loss nll_loss nll_loss_nd nll_loss2d cross_entropy_loss ctc_loss
    """
)
"""Losses with an argument ``reduction``: 1 is the mean, 2 the sum."""

BY_CLASS = words("nll_loss nll_loss_nd nll_loss2d cross_entropy_loss")
"""Losses whose mean is over the targets that are not ignored, by their weights."""

PRODUCTS = words("matmul mm bmm mv dot linear einsum addmm")
ALONG = words(
    """
    softmax log_softmax _softmax _log_softmax cumsum cumprod logcumsumexp cummax cummin sort argsort
    topk flip roll kthvalue
    """
)
CONVOLUTIONS = words("conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d")
FACTORIES = words("new_ones new_zeros new_full zeros_like ones_like full_like")
COUNTS = words("histc bincount")
BATCH_NORMS = words("batch_norm native_batch_norm cudnn_batch_norm miopen_batch_norm")
