"""Unchanged vision-language models of transformers, with batches that can be cut by samples."""

from anabranch.multimodal.batches import multimodal_batch as multimodal_batch
