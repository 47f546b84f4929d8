"""Vision-language models of transformers as they are, cut by samples."""

from anabranch.multimodal.batches import multimodal_batch as multimodal_batch
